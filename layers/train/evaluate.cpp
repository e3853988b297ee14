#include "layers/train/evaluate.h"

#include "core/elementwise.h"
#include "layers/train/callbacks/callbacks.h"

namespace tandem {

MetricSums evaluate_sums(Module& model, BatchSource& source, const Task& task, bool together) {
  NoGrad off;
  const bool training = model.training();
  model.eval();
  MetricSums sums;
  Tensor correct;
  source.start(0);
  for (Batch batch; source.next(batch);) {
    if (!together && asked_to_stop()) {
      sums.interrupted = 1;
      break;
    }
    if (!correct.defined()) correct = Tensor::zeros(batch.images.backend(), {1}, DType::i32);
    const Variable loss = task.judged(model(Variable(batch.images)), batch.labels, &correct);
    sums.loss += loss.item() * double(batch.size());
    sums.samples += double(batch.size());
  }
  if (correct.defined()) sums.correct = correct.item();
  model.train(training);
  return sums;
}

Evaluation evaluate(Module& model, BatchSource& source, Strategy* strategy, const Task& task) {
  const MetricSums mine = evaluate_sums(model, source, task);
  return mean_of(strategy ? strategy->sum(mine) : mine);
}

Variable batch_loss(const Loss& loss, const Variable& logits, const Batch& batch, Tensor* correct) {
  Variable l = loss(logits, batch.labels, correct);
  if (!batch.other_labels.defined()) return l;
  return batch.share * l + (1 - batch.share) * loss(logits, batch.other_labels, nullptr);
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
  // Every value is finite: then it was the sum of their squares that was not.
  const ParameterRange* largest = nullptr;
  double most = 0, total = 0;
  for (const ParameterRange& s : flat.parameter_ranges()) {
    double squares = 0;
    for (double g : s.leaf->grad.values()) squares += g * g;
    total += squares;
    if (squares >= most) most = squares, largest = &s;
  }
  if (largest && total > 3.4e38)
    return "every value is finite, but the squared norm of the gradient overflows f32 (largest: " + largest->name + ")";
  return "";
}

}  // namespace tandem
