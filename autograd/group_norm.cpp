// Group and layer normalisation: one operation of the backend, seen in two ways. Saved are x, the means and the inverse
// standard deviations; nothing differs between training and evaluation.
#include <cmath>

#include "autograd/ops.h"
#include "core/backend.h"

namespace tandem {
namespace {

struct GroupNormNode : Node {
  static constexpr auto name = "group_norm";
  GroupNormShape s;
  explicit GroupNormNode(const GroupNormShape& shape) : Node(name), s(shape) {}

  // inputs: x, gamma, beta. saved: x, gamma, mean, inverse standard deviation.
  void backward(Tensor dy, std::span<GradientSlot> slots) override {
    const Tensor &x = kept(0), &gamma = kept(1), &mean = kept(2), &inverse = kept(3);
    Backend& backend = dy.backend();
    Backend::NormGradients out;
    auto at = [&](int i, const Tensor& input, Tensor*& tensor, bool& add) {
      if (!slots[i].wanted()) return;
      auto destination = slots[i].destination(backend, input.shape(), input.dtype());
      tensor = destination.tensor;
      add = destination.add;
    };
    at(1, gamma, out.dgamma, out.add_dgamma);
    Tensor tied;  // one leaf for gamma and beta: both sums cannot be written to its gradient in one pass
    if (inputs[2] && inputs[1].pointer() == inputs[2].pointer())
      out.dbeta = &(tied = Tensor::like(gamma));
    else
      at(2, gamma, out.dbeta, out.add_dbeta);
    at(0, x, out.dx, out.add_dx);
    if (x.numel() > 0) {
      backend.group_norm_backward(s, x, dy, gamma, mean, inverse, out);
    } else {  // sums of nothing
      if (out.dgamma && !out.add_dgamma) out.dgamma->fill(0);
      if (out.dbeta && !out.add_dbeta) out.dbeta->fill(0);
    }
    if (tied.defined()) slots[2].accumulate(std::move(tied));
  }
};

Variable normalise(const char* op, const GroupNormShape& s, const Variable& x, const Variable& gamma,
                   const Variable& beta) {
  require(s.epsilon >= 0 && std::isfinite(s.epsilon), op, ": epsilon ", s.epsilon, " must be finite and at least 0");
  check_inputs(op, x.value(), {&gamma.value(), &beta.value()});
  Tensor y = Tensor::like(x.value());
  Tensor mean(x.backend(), {s.pictures, s.groups}, gamma.dtype()), inverse = Tensor::like(mean);
  if (x.value().numel() > 0)  // the kernels expect at least one element
    y.backend().group_norm(s, x.value(), gamma.value(), beta.value(), y, mean, inverse);
  return record<GroupNormNode>(y, {&x, &gamma, &beta}, {x.value(), gamma.value(), mean, inverse}, s);
}

}  // namespace

Variable group_norm(const Variable& x, int groups, const Variable& gamma, const Variable& beta, double epsilon) {
  require(x.rank() >= 2, "group_norm: input ", x.shape(), " needs an axis of pictures and one of channels");
  const std::int64_t pictures = x.size(0), channels = x.size(-1);
  require(groups >= 1 && channels % groups == 0, "group_norm: ", channels, " channels (input ", x.shape(),
          ") cannot be cut into ", groups, " groups");
  require(gamma.shape() == Shape({channels}) && beta.shape() == gamma.shape(), "group_norm: input ", x.shape(), " has ",
          channels, " channels, gamma is ", gamma.shape(), " and beta ", beta.shape());
  const std::int64_t row = pictures * channels;
  return normalise("group_norm",
                   {.pictures = pictures,
                    .pixels = row ? x.value().numel() / row : 0,
                    .channels = channels,
                    .groups = groups,
                    .epsilon = epsilon},
                   x, gamma, beta);
}

Variable layer_norm(const Variable& x, const Variable& gamma, const Variable& beta, double epsilon) {
  bool fits = gamma.rank() >= 1 && gamma.rank() <= x.rank() && beta.shape() == gamma.shape();
  for (int axis = 1; fits && axis <= gamma.rank(); axis++) fits = gamma.size(-axis) == x.size(-axis);
  require(fits, "layer_norm: gamma ", gamma.shape(), " and beta ", beta.shape(),
          " have to be the last axes of the input ", x.shape());
  const std::int64_t channels = gamma.value().numel();
  return normalise("layer_norm",
                   {.pictures = channels ? x.value().numel() / channels : 0, .channels = channels, .epsilon = epsilon},
                   x, gamma, beta);
}

}  // namespace tandem
