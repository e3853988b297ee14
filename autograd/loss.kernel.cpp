// Losses that are the mean of an element-wise operation (autograd/elementwise.h): a is the prediction, b the target.
#include <cmath>

#include "autograd/elementwise.h"
#include "core/math.h"

namespace tandem {
namespace {

struct SquaredError {
  static constexpr auto name = "mse_loss";
  template <class A>
  TANDEM_HD static A f(A a, A b) {
    return (a - b) * (a - b);
  }
  template <class A>
  TANDEM_HD static A da(A g, A a, A b) {
    return g * (A(2) * (a - b));
  }
  template <class A>
  TANDEM_HD static A db(A g, A a, A b) {
    return da(g, b, a);
  }
};
template <class A>
TANDEM_HD inline A sign_of(A d) {
  return d > 0 ? A(1) : d < 0 ? A(-1) : d;
}  // a NaN's is NaN
struct AbsoluteError {
  static constexpr auto name = "l1_loss";
  template <class A>
  TANDEM_HD static A f(A a, A b) {
    return std::fabs(a - b);
  }
  template <class A>
  TANDEM_HD static A da(A g, A a, A b) {
    return g * sign_of(a - b);
  }
  template <class A>
  TANDEM_HD static A db(A g, A a, A b) {
    return da(g, b, a);
  }
};
struct Huber {
  static constexpr auto name = "huber_loss";
  double delta;
  Attributes attributes() const { return {{"delta", {delta}}}; }
  template <class A>
  TANDEM_HD A f(A a, A b) const {
    const A d = std::fabs(a - b), c = A(delta);
    return d <= c ? d * d / 2 : c * (d - c / 2);
  }
  template <class A>
  TANDEM_HD A da(A g, A a, A b) const {
    const A d = a - b, c = A(delta);
    return g * (d > c ? c : d < -c ? -c : d);
  }
  template <class A>
  TANDEM_HD A db(A g, A a, A b) const {
    return da(g, b, a);
  }
};
// −b·log σ(a) − (1 − b)·log(1 − σ(a)) = (1 − b)·a + max(−a, 0) + log(1 + e^−|a|), which never overflows.
struct BceWithLogits {
  static constexpr auto name = "bce_with_logits";
  template <class A>
  TANDEM_HD static A f(A a, A b) {
    return (A(1) - b) * a + (a < 0 ? -a : A(0)) + std::log1p(exponential(a < 0 ? a : -a));
  }
  template <class A>
  TANDEM_HD static A da(A g, A a, A b) {
    return g * (A(1) / (A(1) + exponential(-a)) - b);
  }
  template <class A>
  TANDEM_HD static A db(A g, A a, A) {
    return -g * a;
  }
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
