// Element-wise operations of two inputs, broadcast as in NumPy: a functor and a function each (autograd/elementwise.h);
// comparisons, where, and the losses that are a mean over such an operation.
//
// To add one: the functor here, a line in ops.h, a row in tests/op_table.cpp.
#include <cmath>
#include <functional>

#include "autograd/elementwise.h"
#include "core/math.h"

namespace tandem {
namespace {

struct Plus {
  static constexpr auto name = "add";
  static constexpr From from = From::nothing;
  template <class A> TANDEM_HD static A f(A a, A b) { return a + b; }
  template <class A> TANDEM_HD static A da(A g, A, A) { return g; }
  template <class A> TANDEM_HD static A db(A g, A, A) { return g; }
};
struct Minus {
  static constexpr auto name = "sub";
  template <class A> TANDEM_HD static A f(A a, A b) { return a - b; }
  template <class A> TANDEM_HD static A da(A g, A, A) { return g; }
  template <class A> TANDEM_HD static A db(A g, A, A) { return -g; }
};
struct Times {
  static constexpr auto name = "mul";
  template <class A> TANDEM_HD static A f(A a, A b) { return a * b; }
  template <class A> TANDEM_HD static A da(A g, A, A b) { return g * b; }
  template <class A> TANDEM_HD static A db(A g, A a, A) { return g * a; }
};
struct Over {
  static constexpr auto name = "div";
  template <class A> TANDEM_HD static A f(A a, A b) { return a / b; }
  // Not g·(1/b) and −a/b²: these overflow or underflow where the quotient does not.
  template <class A> TANDEM_HD static A da(A g, A, A b) { return g / b; }
  template <class A> TANDEM_HD static A db(A g, A a, A b) { return -g * (a / b / b); }
};
// Passes a NaN on, in both gradients too.
struct Maximum {
  static constexpr auto name = "maximum";
  template <class A> TANDEM_HD static A f(A a, A b) { return a > b || a != a ? a : b; }
  template <class A> TANDEM_HD static A da(A g, A a, A b) { return a < b ? A(0) : a == b ? g / 2 : g; }
  template <class A> TANDEM_HD static A db(A g, A a, A b) { return da(g, b, a); }
};
struct Minimum {
  static constexpr auto name = "minimum";
  template <class A> TANDEM_HD static A f(A a, A b) { return a < b || a != a ? a : b; }
  template <class A> TANDEM_HD static A da(A g, A a, A b) { return a > b ? A(0) : a == b ? g / 2 : g; }
  template <class A> TANDEM_HD static A db(A g, A a, A b) { return da(g, b, a); }
};
struct Pow {
  static constexpr auto name = "pow";
  template <class A> TANDEM_HD static A f(A a, A b) { return std::pow(a, b); }
  template <class A> TANDEM_HD static A da(A g, A a, A b) { return b == 0 ? A(0) : g * (b * std::pow(a, b - 1)); }
  template <class A> TANDEM_HD static A db(A g, A a, A b) { return a == 0 && b >= 0 ? A(0) : g * (std::pow(a, b) * std::log(a)); }
};

// x where the mask m is not 0, else −0, which changes nothing when it is added.
struct Keep {
  static constexpr auto name = "where";
  bool inverted;
  Attributes attributes() const { return {{"inverted", {double(inverted)}}}; }
  template <class A> TANDEM_HD A f(A x, A m) const { return (m != 0) != inverted ? x : A(-0.0); }
  template <class A> TANDEM_HD A da(A g, A, A m) const { return (m != 0) != inverted ? g : A(0); }
  template <class A> TANDEM_HD A db(A, A, A) const { return A(0); }
};

// ---- losses: a is the prediction, b the target ------------------------------------------------------------------------
struct SquaredError {
  static constexpr auto name = "mse_loss";
  template <class A> TANDEM_HD static A f(A a, A b) { return (a - b) * (a - b); }
  template <class A> TANDEM_HD static A da(A g, A a, A b) { return g * (A(2) * (a - b)); }
  template <class A> TANDEM_HD static A db(A g, A a, A b) { return da(g, b, a); }
};
template <class A> TANDEM_HD inline A sign_of(A d) { return d > 0 ? A(1) : d < 0 ? A(-1) : d; }  // a NaN's is NaN
struct AbsoluteError {
  static constexpr auto name = "l1_loss";
  template <class A> TANDEM_HD static A f(A a, A b) { return std::fabs(a - b); }
  template <class A> TANDEM_HD static A da(A g, A a, A b) { return g * sign_of(a - b); }
  template <class A> TANDEM_HD static A db(A g, A a, A b) { return da(g, b, a); }
};
struct Huber {
  static constexpr auto name = "huber_loss";
  double delta;
  Attributes attributes() const { return {{"delta", {delta}}}; }
  template <class A> TANDEM_HD A f(A a, A b) const {
    const A d = std::fabs(a - b), c = A(delta);
    return d <= c ? d * d / 2 : c * (d - c / 2);
  }
  template <class A> TANDEM_HD A da(A g, A a, A b) const {
    const A d = a - b, c = A(delta);
    return g * (d > c ? c : d < -c ? -c : d);
  }
  template <class A> TANDEM_HD A db(A g, A a, A b) const { return da(g, b, a); }
};
// −b·log σ(a) − (1 − b)·log(1 − σ(a)) = (1 − b)·a + max(−a, 0) + log(1 + e^−|a|), which never overflows.
struct BceWithLogits {
  static constexpr auto name = "bce_with_logits";
  template <class A> TANDEM_HD static A f(A a, A b) {
    return (A(1) - b) * a + (a < 0 ? -a : A(0)) + std::log1p(exponential(a < 0 ? a : -a));
  }
  template <class A> TANDEM_HD static A da(A g, A a, A b) { return g * (A(1) / (A(1) + exponential(-a)) - b); }
  template <class A> TANDEM_HD static A db(A g, A a, A) { return -g * a; }
};
template <class Op>
Variable mean_loss(const Op& op, const Variable& x, const Variable& target) {
  require(x.shape() == target.shape(), Op::name, ": the prediction has the shape ", x.shape(), ", the target ", target.shape(),
          ": reshape one of them");
  require(x.value().numel() > 0, Op::name, ": the mean over no elements, shape ", x.shape());
  const DType wide = x.dtype() == DType::f64 ? DType::f64 : DType::f32;
  return mean(elementwise(op, cast(x, wide), cast(target, wide)));
}

// ---- comparisons --------------------------------------------------------------------------------------------------------
template <class Op, class T>
struct Comparison {
  Op op;
  const T *a, *b;
  std::uint8_t* y;
  TANDEM_HD void operator()(std::int64_t i, std::int64_t p, std::int64_t q) const {
    using A = std::conditional_t<std::is_integral_v<T>, T, Accumulator<T>>;
    y[i] = op(A(a[p]), A(b[q]));
  }
};
template <class Op>
Tensor compared(const char* name, const Variable& a, const Variable& b) {
  check_pair(name, a, b);
  Tensor y(a.backend(), broadcast_shape(name, a.shape(), b.shape()), DType::u8);
  dispatch_any(a.dtype(), name, [&]<class T> {
    launch_broadcast(y.backend(), y.numel(), loops_over(y.shape(), a.shape(), b.shape()),
                     Comparison<Op, T>{Op(), a.value().data<T>(), b.value().data<T>(), y.write<std::uint8_t>()});
  });
  return y;
}

}  // namespace

void check_pair(const char* op, const Variable& a, const Variable& b) {
  check_inputs(op, a.value(), {}, {&b.value()});
  require(a.dtype() == b.dtype(), op, ": ", name_of(a.dtype()), " and ", name_of(b.dtype()), ": cast one of them");
}

void sum_to(const Tensor& full, const Shape& shape, Tensor& out, bool add) {
  Shape p = padded(shape, full.rank());
  Tensor x = full;
  int axis = 0, rank = full.rank();
  std::int64_t outer = 1;
  while (true) {  // one run of stretched axes after the other
    while (axis < rank && (p[axis] == full.size(axis))) outer *= p[axis++];
    std::int64_t middle = 1, inner = 1;
    while (axis < rank && p[axis] != full.size(axis)) middle *= full.size(axis++);
    int next = axis;
    while (next < rank && p[next] == full.size(next)) next++;
    for (int i = axis; i < rank; i++) inner *= full.size(i);
    bool last = next == rank;
    if (last) {
      x.backend().reduce(Reduction::sum, outer, middle, inner, x, out, add);
      return;
    }
    Tensor part(x.backend(), {outer * inner}, x.dtype());
    x.backend().reduce(Reduction::sum, outer, middle, inner, x, part, false);
    x = part;
  }
}

Shape broadcast_shape(const char* op, const Shape& a, const Shape& b) {
  const int rank = std::max(a.rank(), b.rank());
  const Shape pa = padded(a, rank), pb = padded(b, rank);
  Shape y;
  for (int i = 0; i < rank; i++) {
    require(pa[i] == pb[i] || pa[i] == 1 || pb[i] == 1, op, ": the shapes ", a, " and ", b, " do not broadcast: sizes ", pa[i],
            " and ", pb[i]);
    y.append(pa[i] == 1 ? pb[i] : pa[i]);
  }
  return y;
}

Variable add(const Variable& a, const Variable& b) { return elementwise(Plus{}, a, b); }
Variable sub(const Variable& a, const Variable& b) { return elementwise(Minus{}, a, b); }
Variable mul(const Variable& a, const Variable& b) { return elementwise(Times{}, a, b); }
Variable div(const Variable& a, const Variable& b) { return elementwise(Over{}, a, b); }
Variable maximum(const Variable& a, const Variable& b) { return elementwise(Maximum{}, a, b); }
Variable minimum(const Variable& a, const Variable& b) { return elementwise(Minimum{}, a, b); }
Variable pow(const Variable& a, const Variable& b) { return elementwise(Pow{}, a, b); }

Tensor eq(const Variable& a, const Variable& b) { return compared<std::equal_to<>>("eq", a, b); }
Tensor ne(const Variable& a, const Variable& b) { return compared<std::not_equal_to<>>("ne", a, b); }
Tensor lt(const Variable& a, const Variable& b) { return compared<std::less<>>("lt", a, b); }
Tensor le(const Variable& a, const Variable& b) { return compared<std::less_equal<>>("le", a, b); }
Tensor gt(const Variable& a, const Variable& b) { return compared<std::greater<>>("gt", a, b); }
Tensor ge(const Variable& a, const Variable& b) { return compared<std::greater_equal<>>("ge", a, b); }

Variable where(const Tensor& mask, const Variable& a, const Variable& b) {
  require(mask.dtype() == DType::u8, "where: the mask has to be u8, as a comparison makes it, not ", name_of(mask.dtype()));
  check_pair("where", a, b);
  check_inputs("where", a.value(), {}, {&mask});
  const Variable m = mask.cast(a.dtype());
  return elementwise(Keep{false}, a, m) + elementwise(Keep{true}, b, m);
}

Variable mse_loss(const Variable& x, const Variable& target) { return mean_loss(SquaredError{}, x, target); }
Variable l1_loss(const Variable& x, const Variable& target) { return mean_loss(AbsoluteError{}, x, target); }
Variable huber_loss(const Variable& x, const Variable& target, double delta) {
  require(delta > 0, "huber_loss: delta ", delta, " must be above 0");
  return mean_loss(Huber{delta}, x, target);
}
Variable bce_with_logits(const Variable& x, const Variable& target) { return mean_loss(BceWithLogits{}, x, target); }

}  // namespace tandem
