// Batch normalisation, with the addition of a residual and ReLU in the same pass over memory. The node saves x, the
// mean and the inverse standard deviation. The ReLU mask is recomputed from x; with a residual it is read from y, which
// the next convolution saves anyway.
#include <cmath>

#include "autograd/ops.h"
#include "core/backend.h"

namespace tandem {
namespace {

NormShape norm_shape(const Variable& x, const BatchNormOptions& o) {
  std::int64_t c = x.size(-1);
  return {.rows = c ? x.value().numel() / c : 0,
          .channels = c,
          .epsilon = o.epsilon,
          .momentum = o.momentum,
          .relu = o.relu};
}

struct BatchNormNode : Node {
  static constexpr auto name = "batch_norm";
  NormShape s;
  bool residual;
  BatchNormNode(const NormShape& shape, bool r) : Node(name), s(shape), residual(r) {}
  Attributes attributes() const override { return {{"epsilon", {s.epsilon}}, {"relu", {double(s.relu)}}}; }
  // Uses the statistics that the first run saved. The running statistics do not change again.
  Recomputation recompute(Operands in) const override {
    Recomputation again{{in[3]->defined() ? in[3]->value() : Tensor()}, [shape = s](std::span<const Tensor> t) {
                          Tensor y = Tensor::like(t[1]);
                          y.backend().batch_norm_again(shape, t[1], t[0].defined() ? &t[0] : nullptr, t[2], t[3], t[4],
                                                       t[5], y);
                          return y;
                        }};
    for (int i = 0; i < 5; i++) again.sources.push_back(saved[i].tensor);
    return again;
  }

  // inputs: x, gamma, beta, residual. saved: x, gamma, beta, mean, inverse standard deviation, y (residual and relu
  // only).
  void backward(Tensor dy, std::span<GradientSlot> slots) override {
    const Tensor &x = kept(0), &gamma = kept(1), &beta = kept(2), &mean = kept(3), &inverse = kept(4);
    Backend& backend = dy.backend();
    Backend::NormGradients out;
    auto at = [&](int i, const Shape& shape, DType type, Tensor*& tensor, bool& add) {
      if (!slots[i].wanted()) return;
      auto destination = slots[i].destination(backend, shape, type);
      tensor = destination.tensor;
      add = destination.add;
    };
    at(1, gamma.shape(), gamma.dtype(), out.dgamma, out.add_dgamma);
    Tensor tied;  // one leaf for gamma and beta: both sums cannot be written to its gradient in one pass
    if (inputs[2] && inputs[1].pointer() == inputs[2].pointer())
      out.dbeta = &(tied = Tensor::like(beta));
    else
      at(2, beta.shape(), beta.dtype(), out.dbeta, out.add_dbeta);
    // Without relu the residual's gradient is dy itself. With relu dy is masked, in place when it is not shared.
    Tensor masked;
    bool wants_residual = residual && slots[3].wanted();
    if (wants_residual && s.relu) {
      masked = dy.unique() ? dy : Tensor::like(dy);
      out.dresidual = &masked;
    }
    at(0, x.shape(), x.dtype(), out.dx, out.add_dx);
    backend.batch_norm_backward(s, x, residual && s.relu ? &kept(5) : nullptr, dy, gamma, beta, mean, inverse, out);
    if (tied.defined()) slots[2].accumulate(std::move(tied));
    if (wants_residual) {
      if (s.relu) dy = Tensor();  // `masked` holds the memory
      slots[3].accumulate(s.relu ? std::move(masked) : std::move(dy));
    }
  }
};

// Evaluation is element-wise in x. Its gradient is rarely needed, so it is composed from other operations.
Variable evaluate(const Variable& x, const Variable& gamma, const Variable& beta, const Tensor& mean,
                  const Tensor& variance, const BatchNormOptions& o, const Variable& residual) {
  Variable g = gamma * rsqrt(Variable(variance) + o.epsilon);
  Variable shift = beta - Variable(mean) * g;
  Variable y = size_of(x.dtype()) == 2 ? cast(x, DType::f32) * g + shift : x * g + shift;
  if (residual.defined()) y = y + cast(residual, y.dtype());
  if (o.relu) y = relu(y);
  return cast(y, x.dtype());
}

}  // namespace

Variable batch_norm(const Variable& x, const Variable& gamma, const Variable& beta, Tensor& running_mean,
                    Tensor& running_variance, const BatchNormOptions& o, const Variable& residual) {
  require(x.rank() >= 2, "batch_norm: input ", x.shape(), " needs a channel axis and at least one more");
  require(o.epsilon >= 0 && std::isfinite(o.epsilon), "batch_norm: epsilon ", o.epsilon,
          " must be finite and at least 0");
  require(o.momentum >= 0 && o.momentum <= 1, "batch_norm: momentum ", o.momentum, " must lie between 0 and 1");
  NormShape s = norm_shape(x, o);
  for (const Tensor* t : {&gamma.value(), &beta.value(), static_cast<const Tensor*>(&running_mean),
                          static_cast<const Tensor*>(&running_variance)})
    require(t->numel() == s.channels, "batch_norm: input ", x.shape(), " has ", s.channels,
            " channels, a parameter has ", t->numel());
  require(!residual.defined() || (residual.shape() == x.shape() && residual.dtype() == x.dtype()),
          "batch_norm: residual ", residual.defined() ? residual.shape() : Shape(), " beside input ", x.shape());
  const Tensor* extra = residual.defined() ? &residual.value() : nullptr;
  check_inputs("batch_norm", x.value(), {&gamma.value(), &beta.value(), &running_mean, &running_variance}, {extra});
  if (!o.training) {
    if (needs_tape({&x, &gamma, &beta, &residual}))
      return evaluate(x, gamma, beta, running_mean, running_variance, o, residual);
    Tensor y = Tensor::like(x.value());
    y.backend().batch_norm_inference(s, x.value(), extra, gamma.value(), beta.value(), running_mean, running_variance,
                                     y);
    const Variable mean(running_mean), variance(running_variance);
    return record<BatchNormNode>(y, {&x, &gamma, &beta, &residual, &mean, &variance}, {}, s, residual.defined());
  }
  require(s.rows > 1, "batch_norm: one value per channel (input ", x.shape(),
          ") has no variance: use a larger batch, or eval()");
  Tensor y = Tensor::like(x.value());
  Tensor mean(x.backend(), {s.channels}, gamma.dtype()), inverse(x.backend(), {s.channels}, gamma.dtype());
  y.backend().batch_norm(s, x.value(), extra, gamma.value(), beta.value(), running_mean, running_variance, y, mean,
                         inverse);
  bool from_y = residual.defined() && o.relu;
  return record<BatchNormNode>(y, {&x, &gamma, &beta, &residual},
                               {x.value(), gamma.value(), beta.value(), mean, inverse, from_y ? y : Tensor()}, s,
                               residual.defined());
}

}  // namespace tandem
