// Element-wise operations of one input: a functor and a function each, made by the template in autograd/elementwise.h.
//
// A new operation needs a functor here, a line in ops.h, and a row in tests/op_table.cpp.
#include "autograd/elementwise.h"
#include "core/math.h"

namespace tandem {
namespace {

TANDEM_HD auto logistic(auto x) { return 1 / (1 + exponential(-x)); }

struct Relu {
  static constexpr auto name = "relu";
  static constexpr From from = From::y;
  TANDEM_HD auto f(auto x) const { return x < 0 ? 0 : x; }  // written so that a NaN stays a NaN
  TANDEM_HD auto df(auto g, auto y) const { return y <= 0 ? 0 : g; }
};
struct LeakyRelu {
  static constexpr auto name = "leaky_relu";
  double slope;
  Attributes attributes() const { return {{"slope", {slope}}}; }
  TANDEM_HD auto f(auto x) const { return x < 0 ? decltype(x)(slope) * x : x; }
  TANDEM_HD auto df(auto g, auto x) const { return x > 0 ? g : g * decltype(x)(slope); }
};
struct Elu {
  static constexpr auto name = "elu";
  double alpha;
  Attributes attributes() const { return {{"alpha", {alpha}}}; }
  TANDEM_HD auto f(auto x) const { return x <= 0 ? decltype(x)(alpha) * exponential_minus_1(x) : x; }
  TANDEM_HD auto df(auto g, auto x) const { return x > 0 ? g : g * (decltype(x)(alpha) * exponential(x)); }
};
struct Gelu {
  static constexpr auto name = "gelu";
  TANDEM_HD auto f(auto x) const { return x * normal_distribution(x); }
  TANDEM_HD auto df(auto g, auto x) const {
    const auto density = decltype(x)(0.39894228040143268) * exponential(-x / 2 * x);
    return g * (normal_distribution(x) + x * density);
  }
};
// 0.5·x·(1 + tanh(u)) = x·logistic(2u). The right side loses no digits where tanh is near −1. x is limited to ±40 in u:
// there logistic(2u) is 0 or 1 to the last digit, and the x³ of a larger x may overflow.
struct GeluTanh {
  static constexpr auto name = "gelu_tanh";
  TANDEM_HD static auto bounded(auto x) { return x < -40 ? -40 : x > 40 ? 40 : x; }
  TANDEM_HD static auto share(auto c) {
    using A = decltype(c);
    return logistic(A(2 * 0.79788456080286536) * (c + A(0.044715) * c * c * c));
  }
  TANDEM_HD auto f(auto x) const { return x * share(bounded(x)); }
  TANDEM_HD auto df(auto g, auto x) const {
    using A = decltype(x);
    const A c = bounded(x), s = share(c), inner = A(2 * 0.79788456080286536) * (1 + A(3 * 0.044715) * c * c);
    return g * (s + x * s * (1 - s) * inner);
  }
};
struct Silu {
  static constexpr auto name = "silu";
  TANDEM_HD auto f(auto x) const { return x * logistic(x); }
  TANDEM_HD auto df(auto g, auto x) const {
    const auto s = logistic(x);
    return g * (s * (1 + x * (1 - s)));
  }
};
struct Hardswish {
  static constexpr auto name = "hardswish";
  TANDEM_HD auto f(auto x) const { return x * ((x < -3 ? 0 : x > 3 ? 6 : x + 3) / 6); }
  TANDEM_HD auto df(auto g, auto x) const { return x < -3 ? 0 : x > 3 ? g : g * (x / 3 + decltype(x)(0.5)); }
};
struct Softplus {
  static constexpr auto name = "softplus";
  // log(1 + e^x) = max(x, 0) + log(1 + e^−|x|): never overflows.
  TANDEM_HD auto f(auto x) const { return (x < 0 ? 0 : x) + std::log1p(exponential(x < 0 ? x : -x)); }
  TANDEM_HD auto df(auto g, auto x) const { return g * logistic(x); }
};
struct Sigmoid {
  static constexpr auto name = "sigmoid";
  static constexpr From from = From::y;
  TANDEM_HD auto f(auto x) const { return logistic(x); }
  TANDEM_HD auto df(auto g, auto y) const { return g * (y * (1 - y)); }
};
struct Tanh {
  static constexpr auto name = "tanh";
  static constexpr From from = From::y;
  TANDEM_HD auto f(auto x) const { return hyperbolic_tangent(x); }
  TANDEM_HD auto df(auto g, auto y) const { return g * (1 - y * y); }
};
struct Exp {
  static constexpr auto name = "exp";
  static constexpr From from = From::y;
  TANDEM_HD auto f(auto x) const { return exponential(x); }
  TANDEM_HD auto df(auto g, auto y) const { return g * y; }
};
struct Log {
  static constexpr auto name = "log";
  TANDEM_HD auto f(auto x) const { return std::log(x); }
  TANDEM_HD auto df(auto g, auto x) const { return g / x; }
};
struct Sqrt {
  static constexpr auto name = "sqrt";
  static constexpr From from = From::y;
  TANDEM_HD auto f(auto x) const { return std::sqrt(x); }
  TANDEM_HD auto df(auto g, auto y) const { return g / (2 * y); }
};
struct Rsqrt {
  static constexpr auto name = "rsqrt";
  static constexpr From from = From::y;
  TANDEM_HD auto f(auto x) const { return 1 / std::sqrt(x); }
  TANDEM_HD auto df(auto g, auto y) const { return -g / 2 * y * y * y; }
};
struct Reciprocal {
  static constexpr auto name = "reciprocal";
  static constexpr From from = From::y;
  TANDEM_HD auto f(auto x) const { return 1 / x; }
  TANDEM_HD auto df(auto g, auto y) const { return -g * y * y; }
};
struct Square {
  static constexpr auto name = "square";
  TANDEM_HD auto f(auto x) const { return x * x; }
  TANDEM_HD auto df(auto g, auto x) const { return g * (2 * x); }
};
struct Abs {
  static constexpr auto name = "abs";
  TANDEM_HD auto f(auto x) const { return std::fabs(x); }
  TANDEM_HD auto df(auto g, auto x) const { return g * (x > 0 ? 1 : x < 0 ? -1 : 0); }
};
struct Sin {
  static constexpr auto name = "sin";
  TANDEM_HD auto f(auto x) const { return std::sin(x); }
  TANDEM_HD auto df(auto g, auto x) const { return g * std::cos(x); }
};
struct Cos {
  static constexpr auto name = "cos";
  TANDEM_HD auto f(auto x) const { return std::cos(x); }
  TANDEM_HD auto df(auto g, auto x) const { return g * -std::sin(x); }
};
struct Clamp {
  static constexpr auto name = "clamp";
  double low, high;
  Attributes attributes() const { return {{"low", {low}}, {"high", {high}}}; }
  TANDEM_HD auto f(auto x) const {
    using A = decltype(x);
    return x < A(low) ? A(low) : x > A(high) ? A(high) : x;
  }
  TANDEM_HD auto df(auto g, auto x) const { return x >= decltype(x)(low) && x <= decltype(x)(high) ? g : 0; }
};
struct Affine {
  static constexpr auto name = "scale";
  static constexpr From from = From::nothing;
  double factor, shift;
  Attributes attributes() const { return {{"factor", {factor}}, {"shift", {shift}}}; }
  TANDEM_HD auto f(auto x) const { return decltype(x)(factor) * x + decltype(x)(shift); }
  TANDEM_HD auto df(auto g, auto) const { return g * decltype(g)(factor); }
};
struct DivideBy {
  static constexpr auto name = "div_by";
  static constexpr From from = From::nothing;
  double divisor;
  Attributes attributes() const { return {{"divisor", {divisor}}}; }
  TANDEM_HD auto f(auto x) const { return x / decltype(x)(divisor); }
  TANDEM_HD auto df(auto g, auto) const { return g / decltype(g)(divisor); }
};
struct Power {
  static constexpr auto name = "power";
  double exponent;
  Attributes attributes() const { return {{"exponent", {exponent}}}; }
  TANDEM_HD auto f(auto x) const { return std::pow(x, decltype(x)(exponent)); }
  TANDEM_HD auto df(auto g, auto x) const {
    using A = decltype(x);
    return exponent == 0 ? 0 : g * (A(exponent) * std::pow(x, A(exponent - 1)));
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
// Adding −0 changes no value, not even the sign of a zero
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
