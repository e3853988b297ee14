#include "layers/train/confusion_matrix.h"

namespace tandem {

Tensor confusion_matrix(Module& model, BatchSource& source) {
  NoGrad off;
  const bool training = model.training();
  model.eval();
  std::vector<double> counts;
  std::int64_t classes = 0;
  Backend* backend = nullptr;
  source.start(0);
  for (Batch batch; source.next(batch);) {
    const Variable logits = model(batch.images);
    require(logits.rank() == 2 && batch.labels.dtype() == DType::i32 && batch.labels.rank() == 1 &&
                batch.labels.size(0) == logits.size(0),
            "confusion_matrix: outputs ", logits.shape(), " and targets ", batch.labels.shape(), " ",
            name_of(batch.labels.dtype()), ", expected [b, classes] and one i32 class for each row [b]");
    const std::vector<double> said = argmax(logits).values(), labels = batch.labels.values();
    classes = logits.size(-1);
    backend = &logits.backend();
    counts.resize(std::size_t(classes * classes));
    for (std::size_t i = 0; i < labels.size(); i++) {
      require(labels[i] >= 0 && labels[i] < double(classes), "confusion_matrix: the label ", labels[i],
              ", the model has ", classes, " classes");
      counts[std::size_t(labels[i]) * std::size_t(classes) + std::size_t(said[i])]++;
    }
  }
  model.train(training);
  return backend ? Tensor::of(*backend, {classes, classes}, counts, DType::i32) : Tensor();
}

}  // namespace tandem
