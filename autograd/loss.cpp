// The loss over class logits. Its softmax subtracts the row's maximum first, so that nothing overflows; the gradient of
// cross-entropy with respect to the logits is (softmax − target)/rows.
#include "autograd/ops.h"
#include "core/backend.h"

namespace tandem {
namespace {

struct CrossEntropyNode : Node {
  static constexpr auto name = "cross_entropy";
  DType dtype;
  double smoothing;
  CrossEntropyNode(DType t, double s) : Node(name), dtype(t), smoothing(s) {}
  void backward(Tensor dy, std::span<GradientSlot> slots) override {
    const Tensor &probabilities = kept(0), &labels = kept(1);
    auto [dx, add] = slots[0].destination(dy.backend(), probabilities.shape(), dtype);
    dy.backend().cross_entropy_backward(probabilities, labels, smoothing, dy, *dx, add);
  }
};

}  // namespace

Variable cross_entropy(const Variable& logits, const Tensor& labels, double smoothing, Tensor* correct) {
  require(logits.rank() == 2 && labels.dtype() == DType::i32 && labels.numel() == logits.size(0),
          "cross_entropy: logits ", logits.shape(), " need one i32 label per row, got ", labels.shape(), " of ",
          name_of(labels.dtype()));
  require(logits.size(0) > 0 && logits.size(1) > 0, "cross_entropy: logits ", logits.shape(), " are empty");
  if (correct)
    require(correct->dtype() == DType::i32 && correct->numel() == 1, "cross_entropy: correct has to be one i32, not ",
            correct->shape(), " of ", name_of(correct->dtype()));
  require(smoothing >= 0 && smoothing < 1, "cross_entropy: label smoothing ", smoothing,
          " must be at least 0 and below 1");
  DType wide = logits.dtype() == DType::f64 ? DType::f64 : DType::f32;
  Tensor loss(logits.backend(), Shape{}, wide), probabilities(logits.backend(), logits.shape(), wide);
  loss.backend().cross_entropy(logits.value(), labels, smoothing, loss, probabilities, correct);
  return record<CrossEntropyNode>(loss, {&logits}, {probabilities, labels}, logits.dtype(), smoothing);
}

}  // namespace tandem
