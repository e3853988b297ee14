// Element-wise operations of one input: a functor and a function each, made by the template in autograd/elementwise.h.
//
// To add one: the functor here, a line in ops.h, a row in tests/op_table.cpp.
#include "autograd/elementwise.h"
#include "core/elementwise.h"
#include "core/math.h"

namespace tandem {
namespace {

struct Relu {
  static constexpr auto name = "relu";
  static constexpr From from = From::y;
  template <class A>
  TANDEM_HD A f(A x) const {
    return x < 0 ? A(0) : x;
  }  // written so that a NaN comes through
  template <class A>
  TANDEM_HD A df(A g, A y) const {
    return y <= 0 ? A(0) : g;
  }
};
struct LeakyRelu {
  static constexpr auto name = "leaky_relu";
  static constexpr From from = From::x;
  double slope;
  Attributes attributes() const { return {{"slope", {slope}}}; }
  template <class A>
  TANDEM_HD A f(A x) const {
    return x < 0 ? A(slope) * x : x;
  }
  template <class A>
  TANDEM_HD A df(A g, A x) const {
    return x > 0 ? g : g * A(slope);
  }
};
struct Elu {
  static constexpr auto name = "elu";
  static constexpr From from = From::x;
  double alpha;
  Attributes attributes() const { return {{"alpha", {alpha}}}; }
  template <class A>
  TANDEM_HD A f(A x) const {
    return x <= 0 ? A(alpha) * exponential_minus_1(x) : x;
  }
  template <class A>
  TANDEM_HD A df(A g, A x) const {
    return x > 0 ? g : g * (A(alpha) * exponential(x));
  }
};
struct Gelu {
  static constexpr auto name = "gelu";
  static constexpr From from = From::x;
  template <class A>
  TANDEM_HD A f(A x) const {
    return x * normal_distribution(x);
  }
  template <class A>
  TANDEM_HD A df(A g, A x) const {
    A density = A(0.39894228040143268) * exponential(A(-0.5) * x * x);
    return g * (normal_distribution(x) + x * density);
  }
};
template <class A>
TANDEM_HD inline A logistic(A x) {
  return A(1) / (A(1) + exponential(-x));
}
// 0.5·x·(1 + tanh(u)) = x·logistic(2u), which keeps its digits where tanh is near −1. Beyond 40 that is 0 or 1 to the
// last digit, and x³ would overflow.
struct GeluTanh {
  static constexpr auto name = "gelu_tanh";
  static constexpr From from = From::x;
  template <class A>
  TANDEM_HD static A bounded(A x) {
    return x < -40 ? A(-40) : x > 40 ? A(40) : x;
  }
  template <class A>
  TANDEM_HD static A share(A c) {
    return logistic(A(2 * 0.79788456080286536) * (c + A(0.044715) * c * c * c));
  }
  template <class A>
  TANDEM_HD A f(A x) const {
    return x * share(bounded(x));
  }
  template <class A>
  TANDEM_HD A df(A g, A x) const {
    A c = bounded(x), s = share(c), inner = A(2 * 0.79788456080286536) * (A(1) + A(3 * 0.044715) * c * c);
    return g * (s + x * s * (A(1) - s) * inner);
  }
};
struct Silu {
  static constexpr auto name = "silu";
  static constexpr From from = From::x;
  template <class A>
  TANDEM_HD A f(A x) const {
    return x * logistic(x);
  }
  template <class A>
  TANDEM_HD A df(A g, A x) const {
    A s = logistic(x);
    return g * (s * (A(1) + x * (A(1) - s)));
  }
};
struct Hardswish {
  static constexpr auto name = "hardswish";
  static constexpr From from = From::x;
  template <class A>
  TANDEM_HD A f(A x) const {
    return x * ((x < -3 ? A(0) : x > 3 ? A(6) : x + A(3)) / A(6));
  }
  template <class A>
  TANDEM_HD A df(A g, A x) const {
    return x < -3 ? A(0) : x > 3 ? g : g * (x / A(3) + A(0.5));
  }
};
struct Softplus {
  static constexpr auto name = "softplus";
  static constexpr From from = From::x;
  // log(1 + e^x) = max(x, 0) + log(1 + e^−|x|): never overflows.
  template <class A>
  TANDEM_HD A f(A x) const {
    return (x < 0 ? A(0) : x) + std::log1p(exponential(x < 0 ? x : -x));
  }
  template <class A>
  TANDEM_HD A df(A g, A x) const {
    return g * logistic(x);
  }
};
struct Sigmoid {
  static constexpr auto name = "sigmoid";
  static constexpr From from = From::y;
  template <class A>
  TANDEM_HD A f(A x) const {
    return logistic(x);
  }
  template <class A>
  TANDEM_HD A df(A g, A y) const {
    return g * (y * (A(1) - y));
  }
};
struct Tanh {
  static constexpr auto name = "tanh";
  static constexpr From from = From::y;
  template <class A>
  TANDEM_HD A f(A x) const {
    return hyperbolic_tangent(x);
  }
  template <class A>
  TANDEM_HD A df(A g, A y) const {
    return g * (A(1) - y * y);
  }
};
struct Exp {
  static constexpr auto name = "exp";
  static constexpr From from = From::y;
  template <class A>
  TANDEM_HD A f(A x) const {
    return exponential(x);
  }
  template <class A>
  TANDEM_HD A df(A g, A y) const {
    return g * y;
  }
};
struct Log {
  static constexpr auto name = "log";
  static constexpr From from = From::x;
  template <class A>
  TANDEM_HD A f(A x) const {
    return std::log(x);
  }
  template <class A>
  TANDEM_HD A df(A g, A x) const {
    return g / x;
  }
};
struct Sqrt {
  static constexpr auto name = "sqrt";
  static constexpr From from = From::y;
  template <class A>
  TANDEM_HD A f(A x) const {
    return std::sqrt(x);
  }
  template <class A>
  TANDEM_HD A df(A g, A y) const {
    return g / (A(2) * y);
  }
};
struct Rsqrt {
  static constexpr auto name = "rsqrt";
  static constexpr From from = From::y;
  template <class A>
  TANDEM_HD A f(A x) const {
    return A(1) / std::sqrt(x);
  }
  template <class A>
  TANDEM_HD A df(A g, A y) const {
    return A(-0.5) * g * y * y * y;
  }
};
struct Reciprocal {
  static constexpr auto name = "reciprocal";
  static constexpr From from = From::y;
  template <class A>
  TANDEM_HD A f(A x) const {
    return A(1) / x;
  }
  template <class A>
  TANDEM_HD A df(A g, A y) const {
    return -g * y * y;
  }
};
struct Square {
  static constexpr auto name = "square";
  static constexpr From from = From::x;
  template <class A>
  TANDEM_HD A f(A x) const {
    return x * x;
  }
  template <class A>
  TANDEM_HD A df(A g, A x) const {
    return g * (A(2) * x);
  }
};
struct Abs {
  static constexpr auto name = "abs";
  static constexpr From from = From::x;
  template <class A>
  TANDEM_HD A f(A x) const {
    return std::fabs(x);
  }
  template <class A>
  TANDEM_HD A df(A g, A x) const {
    return g * (x > 0 ? A(1) : x < 0 ? A(-1) : A(0));
  }
};
struct Sin {
  static constexpr auto name = "sin";
  static constexpr From from = From::x;
  template <class A>
  TANDEM_HD A f(A x) const {
    return std::sin(x);
  }
  template <class A>
  TANDEM_HD A df(A g, A x) const {
    return g * std::cos(x);
  }
};
struct Cos {
  static constexpr auto name = "cos";
  static constexpr From from = From::x;
  template <class A>
  TANDEM_HD A f(A x) const {
    return std::cos(x);
  }
  template <class A>
  TANDEM_HD A df(A g, A x) const {
    return g * -std::sin(x);
  }
};
struct Clamp {
  static constexpr auto name = "clamp";
  static constexpr From from = From::x;
  double low, high;
  Attributes attributes() const { return {{"low", {low}}, {"high", {high}}}; }
  template <class A>
  TANDEM_HD A f(A x) const {
    return x < A(low) ? A(low) : x > A(high) ? A(high) : x;
  }
  template <class A>
  TANDEM_HD A df(A g, A x) const {
    return x >= A(low) && x <= A(high) ? g : A(0);
  }
};
struct Affine {
  static constexpr auto name = "scale";
  static constexpr From from = From::nothing;
  double factor, shift;
  Attributes attributes() const { return {{"factor", {factor}}, {"shift", {shift}}}; }
  template <class A>
  TANDEM_HD A f(A x) const {
    return A(factor) * x + A(shift);
  }
  template <class A>
  TANDEM_HD A df(A g, A) const {
    return g * A(factor);
  }
};
struct DivideBy {
  static constexpr auto name = "div_by";
  static constexpr From from = From::nothing;
  double divisor;
  Attributes attributes() const { return {{"divisor", {divisor}}}; }
  template <class A>
  TANDEM_HD A f(A x) const {
    return x / A(divisor);
  }
  template <class A>
  TANDEM_HD A df(A g, A) const {
    return g / A(divisor);
  }
};
struct Power {
  static constexpr auto name = "power";
  static constexpr From from = From::x;
  double exponent;
  Attributes attributes() const { return {{"exponent", {exponent}}}; }
  template <class A>
  TANDEM_HD A f(A x) const {
    return std::pow(x, A(exponent));
  }
  template <class A>
  TANDEM_HD A df(A g, A x) const {
    return exponent == 0 ? A(0) : g * (A(exponent) * std::pow(x, A(exponent - 1)));
  }
};

struct CastNode : Node {
  static constexpr auto name = "cast";
  DType from;
  explicit CastNode(DType t) : Node(name), from(t) {}
  void backward(Tensor dy, std::span<GradientSlot> slots) override { slots[0].accumulate(dy.cast(from)); }
};

}  // namespace

Variable relu(const Variable& x) { return elementwise(Relu{}, x); }
Variable leaky_relu(const Variable& x, double slope) { return elementwise(LeakyRelu{slope}, x); }
Variable elu(const Variable& x, double alpha) { return elementwise(Elu{alpha}, x); }
Variable gelu(const Variable& x) { return elementwise(Gelu{}, x); }
Variable gelu_tanh(const Variable& x) { return elementwise(GeluTanh{}, x); }
Variable silu(const Variable& x) { return elementwise(Silu{}, x); }
Variable hardswish(const Variable& x) { return elementwise(Hardswish{}, x); }
Variable softplus(const Variable& x) { return elementwise(Softplus{}, x); }
Variable sigmoid(const Variable& x) { return elementwise(Sigmoid{}, x); }
Variable tanh(const Variable& x) { return elementwise(Tanh{}, x); }
Variable exp(const Variable& x) { return elementwise(Exp{}, x); }
Variable log(const Variable& x) { return elementwise(Log{}, x); }
Variable sqrt(const Variable& x) { return elementwise(Sqrt{}, x); }
Variable rsqrt(const Variable& x) { return elementwise(Rsqrt{}, x); }
Variable reciprocal(const Variable& x) { return elementwise(Reciprocal{}, x); }
Variable square(const Variable& x) { return elementwise(Square{}, x); }
Variable abs(const Variable& x) { return elementwise(Abs{}, x); }
// Adding −0 changes nothing, not even 0's sign
Variable neg(const Variable& x) { return elementwise(Affine{-1, -0.0}, x); }
Variable sin(const Variable& x) { return elementwise(Sin{}, x); }
Variable cos(const Variable& x) { return elementwise(Cos{}, x); }
Variable clamp(const Variable& x, double low, double high) {
  require(low <= high, "clamp: low ", low, " is above high ", high);
  return elementwise(Clamp{low, high}, x);
}
Variable scale(const Variable& x, double factor, double shift) { return elementwise(Affine{factor, shift}, x); }
Variable div_by(const Variable& x, double divisor) { return elementwise(DivideBy{divisor}, x); }
Variable power(const Variable& x, double exponent) { return elementwise(Power{exponent}, x); }
Variable cast(const Variable& x, DType dtype) {
  if (x.dtype() == dtype) return x;
  return record<CastNode>(x.value().cast(dtype), {&x}, {}, x.dtype());
}

}  // namespace tandem
