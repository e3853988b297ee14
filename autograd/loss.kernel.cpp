// Losses that are the mean of an element-wise operation (autograd/elementwise.h): a is the prediction, b the target.
#include <cmath>

#include "autograd/elementwise.h"
#include "core/math.h"

namespace tandem {
namespace {

struct SquaredError {
  static constexpr auto name = "mse_loss";
  TANDEM_HD auto f(auto a, auto b) const { return (a - b) * (a - b); }
  TANDEM_HD auto da(auto g, auto a, auto b) const { return g * (2 * (a - b)); }
  TANDEM_HD auto db(auto g, auto a, auto b) const { return da(g, b, a); }
};
struct AbsoluteError {
  static constexpr auto name = "l1_loss";
  TANDEM_HD auto f(auto a, auto b) const { return std::fabs(a - b); }
  TANDEM_HD auto da(auto g, auto a, auto b) const { return g * (a > b ? 1 : a < b ? -1 : a - b); }  // NaN for a NaN
  TANDEM_HD auto db(auto g, auto a, auto b) const { return da(g, b, a); }
};
struct Huber {
  static constexpr auto name = "huber_loss";
  double delta;
  Attributes attributes() const { return {{"delta", {delta}}}; }
  TANDEM_HD auto f(auto a, auto b) const {
    const auto d = std::fabs(a - b), c = decltype(a)(delta);
    return d <= c ? d * d / 2 : c * (d - c / 2);
  }
  TANDEM_HD auto da(auto g, auto a, auto b) const {
    const auto d = a - b, c = decltype(a)(delta);
    return g * (d > c ? c : d < -c ? -c : d);
  }
  TANDEM_HD auto db(auto g, auto a, auto b) const { return da(g, b, a); }
};
// −b·log σ(a) − (1 − b)·log(1 − σ(a)) = (1 − b)·a + max(−a, 0) + log(1 + e^−|a|), which never overflows.
struct BceWithLogits {
  static constexpr auto name = "bce_with_logits";
  TANDEM_HD auto f(auto a, auto b) const {
    return (1 - b) * a + (a < 0 ? -a : 0) + std::log1p(exponential(a < 0 ? a : -a));
  }
  TANDEM_HD auto da(auto g, auto a, auto b) const { return g * (1 / (1 + exponential(-a)) - b); }
  TANDEM_HD auto db(auto g, auto a, auto) const { return -g * a; }
};
template <class Op>
Variable mean_loss(const Op& op, const Variable& x, const Variable& target) {
  require(x.shape() == target.shape(), Op::name, ": the prediction has the shape ", x.shape(), ", the target ",
          target.shape(), ": reshape one of them");
  require(x.value().numel() > 0, Op::name, ": the mean over no elements, shape ", x.shape());
  const DType wide = x.dtype() == DType::f64 ? DType::f64 : DType::f32;
  return mean(elementwise(op, cast(x, wide), cast(target, wide)));
}

}  // namespace

Variable mse_loss(const Variable& x, const Variable& target) { return mean_loss(SquaredError{}, x, target); }
Variable l1_loss(const Variable& x, const Variable& target) { return mean_loss(AbsoluteError{}, x, target); }
Variable huber_loss(const Variable& x, const Variable& target, double delta) {
  require(delta > 0, "huber_loss: delta ", delta, " must be above 0");
  return mean_loss(Huber{delta}, x, target);
}
Variable bce_with_logits(const Variable& x, const Variable& target) { return mean_loss(BceWithLogits{}, x, target); }

}  // namespace tandem
