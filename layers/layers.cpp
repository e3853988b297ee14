#include "layers/layers.h"

namespace tandem {
namespace {

const Variable none;
const Variable& optional(const Parameter* p) { return p ? static_cast<const Variable&>(*p) : none; }

}  // namespace

Linear::Linear(std::int64_t in, std::int64_t out, bool bias, bool relu) : relu_(relu) {
  weight_ = &parameter("weight", {out, in}, Initial::fan_in_uniform(in));
  if (bias) bias_ = &parameter("bias", {out}, Initial::fan_in_uniform(in), false);
}

Variable Linear::forward(const Variable& x) {
  if (of_slice_ && weight_->slice.count > 1) return of_slice_(x, *weight_, optional(bias_), training());
  return linear(x, *weight_, optional(bias_), relu_);
}

void Linear::cut(Slice slice, Operation operation) {
  weight_->slice = slice;
  if (bias_) bias_->slice = slice;
  of_slice_ = std::move(operation);
}

Conv2d::Conv2d(std::int64_t in, std::int64_t out, int kernel_size, const Conv2dOptions& options, bool bias)
    : options_(options) {
  require(options.groups >= 1 && in % options.groups == 0 && out % options.groups == 0, "Conv2d: ", in, " input and ",
          out, " output channels cannot be cut into ", options.groups, " groups");
  std::int64_t fan_in = in / options.groups * kernel_size * kernel_size;
  weight_ = &parameter("weight", {out, kernel_size, kernel_size, in / options.groups}, Initial::fan_in_uniform(fan_in));
  if (bias) bias_ = &parameter("bias", {out}, Initial::fan_in_uniform(fan_in), false);
}

std::unique_ptr<Conv2d> Conv2d::before_norm(std::int64_t in, std::int64_t out, int kernel_size, int stride, bool bias) {
  auto conv =
      std::make_unique<Conv2d>(in, out, kernel_size, Conv2dOptions{.stride = stride, .padding = kernel_size / 2}, bias);
  conv->weight_->initial =
      Initial::kaiming_normal(conv->weight_->shape, {.mode = Fan::out, .nonlinearity = Nonlinearity::relu});
  return conv;
}

Variable Conv2d::forward(const Variable& x) { return conv2d(x, *weight_, optional(bias_), options_); }

BatchNorm2d::BatchNorm2d(std::int64_t channels, bool relu, double epsilon, double momentum)
    : Affine({channels}), options_{.epsilon = epsilon, .momentum = momentum, .relu = relu} {
  running_mean_ = &buffer("running_mean", {channels}, 0);
  running_var_ = &buffer("running_var", {channels}, 1);
}

Variable BatchNorm2d::forward(const Variable& x, const Variable& residual) {
  BatchNormOptions o = options_;
  o.training = training();
  if (o.training && in_training_)
    return in_training_(x, *weight_, *bias_, running_mean_->tensor, running_var_->tensor, o, residual);
  return batch_norm(x, *weight_, *bias_, running_mean_->tensor, running_var_->tensor, o, residual);
}

Variable BatchNorm2d::operator()(const Variable& x, const Variable& residual) {
  Scope scope(path());
  return seen(forward(x, residual));
}

GroupNorm::GroupNorm(int groups, std::int64_t channels, double epsilon)
    : Affine({channels}), groups_(groups), epsilon_(epsilon) {
  require(groups >= 1 && channels % groups == 0, "GroupNorm: ", channels, " channels cannot be cut into ", groups,
          " groups");
}

}  // namespace tandem
