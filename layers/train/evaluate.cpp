#include "layers/train/evaluate.h"

#include "core/elementwise.h"
#include "layers/train/run.h"

namespace tandem {

namespace {

// Adds a batch to MetricSums::classes: outputs [b, classes], labels i32 [b].
void count_classes(const Variable& outputs, const Tensor& labels, std::vector<double>& classes) {
  const std::vector<double> chosen = argmax(outputs).values(), label = labels.values();
  classes.resize(2 * std::size_t(outputs.size(1)));
  for (std::size_t i = 0; i < label.size(); i++) {
    const auto c = 2 * std::size_t(label[i]);
    classes[c] += chosen[i] == label[i];
    classes[c + 1]++;
  }
}

// Calls visit for the batches of an epoch, in eval mode and without recording, until it returns false. The model's mode
// is restored.
template <class Visit>
void each_batch(Module& model, BatchSource& source, const Visit& visit) {
  NoGrad off;
  const InMode evaluates(model, false);
  source.start(0);
  for (Batch batch; source.next(batch) && visit(batch);) {}
}

}  // namespace

MetricSums evaluate_sums(Module& model, BatchSource& source, const Task& task, bool together) {
  MetricSums sums;
  Tensor correct;
  each_batch(model, source, [&](const Batch& batch) {
    if (!together && asked_to_stop()) {
      sums.interrupted = 1;
      return false;
    }
    if (!correct.defined()) correct = Tensor::zeros(batch.images.backend(), {1}, DType::i32);
    const Variable outputs = model(Variable(batch.images)), loss = task.evaluation(outputs, batch.labels, &correct);
    if (!together && task.has_accuracy && batch.labels.dtype() == DType::i32 && outputs.rank() == 2)
      count_classes(outputs, batch.labels, sums.classes);
    sums.loss += loss.item() * double(batch.size());
    sums.samples += double(batch.size());
    return true;
  });
  if (correct.defined()) sums.correct = correct.item();
  return sums;
}

Evaluation mean_of(const MetricSums& s) {
  if (s.samples == 0) return {};
  Evaluation mean{s.loss / s.samples, s.correct / s.samples};
  for (std::size_t c = 0; c < s.classes.size(); c += 2) mean.class_accuracy.push_back(s.classes[c] / s.classes[c + 1]);
  return mean;
}

Evaluation evaluate(Module& model, BatchSource& source, Strategy* strategy, const Task& task) {
  const MetricSums mine = evaluate_sums(model, source, task, strategy != nullptr);
  return mean_of(strategy ? strategy->sum(mine) : mine);
}

Tensor confusion_matrix(Module& model, BatchSource& source) {
  std::vector<double> counts;
  Variable logits;  // of the last batch
  each_batch(model, source, [&](const Batch& batch) {
    logits = model(batch.images);
    require(logits.rank() == 2 && batch.labels.dtype() == DType::i32 && batch.labels.rank() == 1 &&
                batch.labels.size(0) == logits.size(0),
            "confusion_matrix: outputs ", logits.shape(), " and targets ", batch.labels.shape(), " ",
            name_of(batch.labels.dtype()), ", expected [b, classes] and one i32 class for each row [b]");
    const std::vector<double> predicted = argmax(logits).values(), labels = batch.labels.values();
    const auto classes = std::size_t(logits.size(-1));
    counts.resize(classes * classes);
    for (std::size_t i = 0; i < labels.size(); i++) {
      require(labels[i] >= 0 && labels[i] < double(classes), "confusion_matrix: the label ", labels[i],
              ", the model has ", classes, " classes");
      counts[std::size_t(labels[i]) * classes + std::size_t(predicted[i])]++;
    }
    return true;
  });
  if (counts.empty()) return {};
  return Tensor::of(logits.backend(), {logits.size(-1), logits.size(-1)}, counts, DType::i32);
}

Variable batch_loss(const Loss& loss, const Variable& logits, const Batch& batch, Tensor* correct) {
  Variable l = loss(logits, batch.labels, correct);
  if (!batch.other_labels.defined()) return l;
  return batch.share * l + (1 - batch.share) * loss(logits, batch.other_labels, nullptr);
}

Shape picture_of(BatchSource& source) {
  const Shape batch = source.make(0, 0).images.shape();
  return {batch[1], batch[2], batch[3]};
}

std::string diagnose(Module& model, const Loss& loss, FlatParameters& flat, const Batch& batch) {
  for (const ParameterRange& s : flat.parameter_ranges())
    if (!all_finite(s.leaf->value)) return "the parameter " + s.name + " is not finite: an earlier update overflowed";
  if (!all_finite(batch.images)) return "the input pictures hold a value that is not finite";
  CheckForNonFinite check;
  try {
    Variable l = batch_loss(loss, model(Variable(batch.images)), batch);
    flat.zero_gradients();
    flat.backward(l);
  } catch (const NotFinite& e) {
    return e.what();
  }
  // Every value is finite, so the sum of their squares overflowed.
  const ParameterRange* largest = nullptr;
  double most = 0, total = 0;
  for (const ParameterRange& s : flat.parameter_ranges()) {
    double squares = 0;
    for (double g : s.leaf->grad.values()) squares += g * g;
    total += squares;
    if (squares < most) continue;
    most = squares;
    largest = &s;
  }
  if (largest && total > 3.4e38)
    return "every value is finite, but the squared norm of the gradient overflows f32 (largest: " + largest->name + ")";
  return "";
}

}  // namespace tandem
