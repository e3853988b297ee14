// Group and layer normalisation, composed from other operations. 16-bit pictures are normalised in f32. The result
// is the same in training and evaluation.
#include <algorithm>
#include <cmath>

#include "autograd/ops.h"

namespace tandem {
namespace {

// s: x as [pictures, pixels, groups, channels of a group]. Each group of each picture gets mean 0 and variance 1. All
// large tensors are [pictures, pixels, channels], so that the inner loops are over channels.
Variable normalise(const char* op, const Variable& x, const Shape& s, const Variable& gamma, const Variable& beta,
                   double epsilon) {
  require(epsilon >= 0 && std::isfinite(epsilon), op, ": epsilon ", epsilon, " must be finite and at least 0");
  check_inputs(op, x.value(), {&gamma.value(), &beta.value()});
  const std::int64_t pictures = s[0], pixels = s[1], groups = s[2], channels = s[2] * s[3];
  const double count = double(std::max<std::int64_t>(1, pixels * s[3]));  // the mean of no elements is 0
  const Variable ones(Tensor::full(x.backend(), {groups, s[3]}, 1, gamma.dtype()));
  auto average = [&](const Variable& v) {  // [pictures, 1, channels], or 1 in place of channels
    if (pixels == 1 && groups == 1) return sum(v, {2}, true) / count;
    const Variable of_groups = sum(reshape(sum(v, {1}), {pictures, groups, s[3]}), {2}, true) / count;
    return reshape(of_groups * ones, {pictures, 1, channels});
  };
  const Variable wide = reshape(cast(x, gamma.dtype()), {pictures, pixels, channels});
  const Variable centred = wide - average(wide);
  const Variable inverse = rsqrt(average(square(centred)) + epsilon);
  const Variable y = centred * (inverse * reshape(gamma, {channels})) + reshape(beta, {channels});
  return cast(reshape(y, x.shape()), x.dtype());
}

}  // namespace

Variable group_norm(const Variable& x, int groups, const Variable& gamma, const Variable& beta, double epsilon) {
  require(x.rank() >= 2, "group_norm: input ", x.shape(), " needs an axis of pictures and one of channels");
  const std::int64_t pictures = x.size(0), channels = x.size(-1);
  require(groups >= 1 && channels % groups == 0, "group_norm: ", channels, " channels (input ", x.shape(),
          ") cannot be cut into ", groups, " groups");
  require(gamma.shape() == Shape({channels}) && beta.shape() == gamma.shape(), "group_norm: input ", x.shape(), " has ",
          channels, " channels, gamma is ", gamma.shape(), " and beta ", beta.shape());
  std::int64_t pixels = 1;
  for (int axis = 1; axis + 1 < x.rank(); axis++) pixels *= x.size(axis);
  return normalise("group_norm", x, {pictures, pixels, groups, channels / groups}, gamma, beta, epsilon);
}

Variable layer_norm(const Variable& x, const Variable& gamma, const Variable& beta, double epsilon) {
  bool fits = gamma.rank() >= 1 && gamma.rank() <= x.rank() && beta.shape() == gamma.shape();
  for (int axis = 1; fits && axis <= gamma.rank(); axis++) fits = gamma.size(-axis) == x.size(-axis);
  require(fits, "layer_norm: gamma ", gamma.shape(), " and beta ", beta.shape(),
          " have to be the last axes of the input ", x.shape());
  std::int64_t rows = 1;
  for (int axis = 0; axis < x.rank() - gamma.rank(); axis++) rows *= x.size(axis);
  return normalise("layer_norm", x, {rows, 1, 1, gamma.value().numel()}, gamma, beta, epsilon);
}

}  // namespace tandem
