#include "layers/train/task.h"

#include "autograd/ops.h"

namespace tandem {
namespace {

Variable like(const Variable& outputs, const Tensor& targets) {
  const DType type = outputs.value().dtype();
  return Variable(targets.dtype() == type ? targets : targets.cast(type));
}

}  // namespace

Variable CrossEntropy::operator()(const Variable& outputs, const Tensor& targets, Tensor* correct) const {
  return cross_entropy(outputs, targets, label_smoothing, correct);
}

Loss cross_entropy_loss(double label_smoothing) { return CrossEntropy{label_smoothing}; }

Task classification(double label_smoothing) {
  return {cross_entropy_loss(label_smoothing), cross_entropy_loss(), true, "classification"};
}

Task regression() {
  const Loss squared = [](const Variable& outputs, const Tensor& targets, Tensor*) {
    return mse_loss(outputs, like(outputs, targets));
  };
  return {squared, squared, false, "regression"};
}

Task multi_label() {
  const Loss each = [](const Variable& outputs, const Tensor& targets, Tensor* correct) {
    if (correct) {
      NoGrad off;
      const Variable zero(Tensor::zeros(targets.backend(), {1}, outputs.value().dtype()));
      const Variable said(gt(outputs, zero).cast(targets.dtype()));  // 1 where the label is predicted
      const Variable wrong = max(Variable(ne(said, Variable(targets)).cast(DType::f32)), {1});
      const Variable right = sum(scale(wrong, -1, 1)), before(correct->cast(DType::f32));
      correct->copy_from((before + reshape(right, Shape{1})).value().cast(DType::i32));
    }
    return bce_with_logits(outputs, like(outputs, targets));
  };
  return {each, each, true, "multi-label"};
}

}  // namespace tandem
