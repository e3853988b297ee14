// Element-wise operations of one input. An operation is a functor: f is the function; df the gradient g·f′, written in terms of
// the input x or of the output y, whichever needs less work: that one is saved. One template makes the forward loop, the node
// and the backward loop of all of them, on every device.
//
// To add one: the functor here, a line in ops.h, a row in tests/test_op_table.cpp.
#include "autograd/ops.h"
#include "core/elementwise.h"
#include "core/launch.h"
#include "core/math.h"

namespace tandem {
namespace {

enum class From { x, y, nothing };  // what df reads

// A stands for the arithmetic type: float, or double on the reference backend. g is the gradient behind the result.
struct Relu {
  static constexpr auto name = "relu";
  static constexpr From from = From::y;
  template <class A> TANDEM_HD A f(A x) const { return x < 0 ? A(0) : x; }  // written so that a NaN comes through
  template <class A> TANDEM_HD A df(A g, A y) const { return y <= 0 ? A(0) : g; }
};
struct LeakyRelu {
  static constexpr auto name = "leaky_relu";
  static constexpr From from = From::x;
  double slope;
  template <class A> TANDEM_HD A f(A x) const { return x < 0 ? A(slope) * x : x; }
  template <class A> TANDEM_HD A df(A g, A x) const { return x > 0 ? g : g * A(slope); }
};
struct Elu {
  static constexpr auto name = "elu";
  static constexpr From from = From::x;
  double alpha;
  template <class A> TANDEM_HD A f(A x) const { return x <= 0 ? A(alpha) * exponential_minus_1(x) : x; }
  template <class A> TANDEM_HD A df(A g, A x) const { return x > 0 ? g : g * (A(alpha) * exponential(x)); }
};
struct Gelu {
  static constexpr auto name = "gelu";
  static constexpr From from = From::x;
  template <class A> TANDEM_HD A f(A x) const { return x * normal_distribution(x); }
  template <class A> TANDEM_HD A df(A g, A x) const {
    A density = A(0.39894228040143268) * exponential(A(-0.5) * x * x);
    return g * (normal_distribution(x) + x * density);
  }
};
template <class A> TANDEM_HD inline A logistic(A x) { return A(1) / (A(1) + exponential(-x)); }
// 0.5·x·(1 + tanh(u)) = x·logistic(2u), which keeps its digits where tanh is near −1. Beyond 40 that is 0 or 1 to the last
// digit, and x³ would overflow.
struct GeluTanh {
  static constexpr auto name = "gelu_tanh";
  static constexpr From from = From::x;
  template <class A> TANDEM_HD static A bounded(A x) { return x < -40 ? A(-40) : x > 40 ? A(40) : x; }
  template <class A> TANDEM_HD static A share(A c) {
    return logistic(A(2 * 0.79788456080286536) * (c + A(0.044715) * c * c * c));
  }
  template <class A> TANDEM_HD A f(A x) const { return x * share(bounded(x)); }
  template <class A> TANDEM_HD A df(A g, A x) const {
    A c = bounded(x), s = share(c), inner = A(2 * 0.79788456080286536) * (A(1) + A(3 * 0.044715) * c * c);
    return g * (s + x * s * (A(1) - s) * inner);
  }
};
struct Silu {
  static constexpr auto name = "silu";
  static constexpr From from = From::x;
  template <class A> TANDEM_HD A f(A x) const { return x * logistic(x); }
  template <class A> TANDEM_HD A df(A g, A x) const {
    A s = logistic(x);
    return g * (s * (A(1) + x * (A(1) - s)));
  }
};
struct Hardswish {
  static constexpr auto name = "hardswish";
  static constexpr From from = From::x;
  template <class A> TANDEM_HD A f(A x) const { return x * ((x < -3 ? A(0) : x > 3 ? A(6) : x + A(3)) / A(6)); }
  template <class A> TANDEM_HD A df(A g, A x) const { return x < -3 ? A(0) : x > 3 ? g : g * (x / A(3) + A(0.5)); }
};
struct Softplus {
  static constexpr auto name = "softplus";
  static constexpr From from = From::x;
  // log(1 + e^x) = max(x, 0) + log(1 + e^−|x|): never overflows.
  template <class A> TANDEM_HD A f(A x) const { return (x < 0 ? A(0) : x) + std::log1p(exponential(x < 0 ? x : -x)); }
  template <class A> TANDEM_HD A df(A g, A x) const { return g * logistic(x); }
};
struct Sigmoid {
  static constexpr auto name = "sigmoid";
  static constexpr From from = From::y;
  template <class A> TANDEM_HD A f(A x) const { return logistic(x); }
  template <class A> TANDEM_HD A df(A g, A y) const { return g * (y * (A(1) - y)); }
};
struct Tanh {
  static constexpr auto name = "tanh";
  static constexpr From from = From::y;
  template <class A> TANDEM_HD A f(A x) const { return hyperbolic_tangent(x); }
  template <class A> TANDEM_HD A df(A g, A y) const { return g * (A(1) - y * y); }
};
struct Exp {
  static constexpr auto name = "exp";
  static constexpr From from = From::y;
  template <class A> TANDEM_HD A f(A x) const { return exponential(x); }
  template <class A> TANDEM_HD A df(A g, A y) const { return g * y; }
};
struct Log {
  static constexpr auto name = "log";
  static constexpr From from = From::x;
  template <class A> TANDEM_HD A f(A x) const { return std::log(x); }
  template <class A> TANDEM_HD A df(A g, A x) const { return g / x; }
};
struct Sqrt {
  static constexpr auto name = "sqrt";
  static constexpr From from = From::y;
  template <class A> TANDEM_HD A f(A x) const { return std::sqrt(x); }
  template <class A> TANDEM_HD A df(A g, A y) const { return g / (A(2) * y); }
};
struct Rsqrt {
  static constexpr auto name = "rsqrt";
  static constexpr From from = From::y;
  template <class A> TANDEM_HD A f(A x) const { return A(1) / std::sqrt(x); }
  template <class A> TANDEM_HD A df(A g, A y) const { return A(-0.5) * g * y * y * y; }
};
struct Reciprocal {
  static constexpr auto name = "reciprocal";
  static constexpr From from = From::y;
  template <class A> TANDEM_HD A f(A x) const { return A(1) / x; }
  template <class A> TANDEM_HD A df(A g, A y) const { return -g * y * y; }
};
struct Square {
  static constexpr auto name = "square";
  static constexpr From from = From::x;
  template <class A> TANDEM_HD A f(A x) const { return x * x; }
  template <class A> TANDEM_HD A df(A g, A x) const { return g * (A(2) * x); }
};
struct Abs {
  static constexpr auto name = "abs";
  static constexpr From from = From::x;
  template <class A> TANDEM_HD A f(A x) const { return std::fabs(x); }
  template <class A> TANDEM_HD A df(A g, A x) const { return g * (x > 0 ? A(1) : x < 0 ? A(-1) : A(0)); }
};
struct Sin {
  static constexpr auto name = "sin";
  static constexpr From from = From::x;
  template <class A> TANDEM_HD A f(A x) const { return std::sin(x); }
  template <class A> TANDEM_HD A df(A g, A x) const { return g * std::cos(x); }
};
struct Cos {
  static constexpr auto name = "cos";
  static constexpr From from = From::x;
  template <class A> TANDEM_HD A f(A x) const { return std::cos(x); }
  template <class A> TANDEM_HD A df(A g, A x) const { return g * -std::sin(x); }
};
struct Clamp {
  static constexpr auto name = "clamp";
  static constexpr From from = From::x;
  double low, high;
  template <class A> TANDEM_HD A f(A x) const { return x < A(low) ? A(low) : x > A(high) ? A(high) : x; }
  template <class A> TANDEM_HD A df(A g, A x) const { return x >= A(low) && x <= A(high) ? g : A(0); }
};
struct Affine {
  static constexpr auto name = "scale";
  static constexpr From from = From::nothing;
  double factor, shift;
  template <class A> TANDEM_HD A f(A x) const { return A(factor) * x + A(shift); }
  template <class A> TANDEM_HD A df(A g, A) const { return g * A(factor); }
};
struct DivideBy {
  static constexpr auto name = "div_by";
  static constexpr From from = From::nothing;
  double divisor;
  template <class A> TANDEM_HD A f(A x) const { return x / A(divisor); }
  template <class A> TANDEM_HD A df(A g, A) const { return g / A(divisor); }
};
struct Power {
  static constexpr auto name = "power";
  static constexpr From from = From::x;
  double exponent;
  template <class A> TANDEM_HD A f(A x) const { return std::pow(x, A(exponent)); }
  template <class A> TANDEM_HD A df(A g, A x) const {
    return exponent == 0 ? A(0) : g * (A(exponent) * std::pow(x, A(exponent - 1)));
  }
};

// ---- the template behind all of them ---------------------------------------------------------------------------------
template <class Op, class T>
struct Forward {
  Op op;
  const T* x;
  T* y;
  TANDEM_HD void operator()(std::int64_t i) const { y[i] = T(op.f(Accumulator<T>(x[i]))); }
};

template <class Op, class T, bool add>
struct Backward {
  Op op;
  const T *kept, *dy;
  T* dx;
  TANDEM_HD void operator()(std::int64_t i) const {
    using A = Accumulator<T>;
    A g = op.df(A(dy[i]), A(kept[i]));
    dx[i] = T(add ? A(dx[i]) + g : g);
  }
};

template <class Op>
struct UnaryNode : Node {
  static constexpr auto name = Op::name;
  Op functor;
  explicit UnaryNode(const Op& f) : Node(name), functor(f) {}
  Attributes attributes() const override {
    if constexpr (requires { functor.slope; }) return {{"slope", {functor.slope}}};
    else if constexpr (requires { functor.alpha; }) return {{"alpha", {functor.alpha}}};
    else if constexpr (requires { functor.low; }) return {{"low", {functor.low}}, {"high", {functor.high}}};
    else if constexpr (requires { functor.factor; }) return {{"factor", {functor.factor}}, {"shift", {functor.shift}}};
    else if constexpr (requires { functor.divisor; }) return {{"divisor", {functor.divisor}}};
    else if constexpr (requires { functor.exponent; }) return {{"exponent", {functor.exponent}}};
    else return {};
  }
  void backward(Tensor dy, std::span<Sink> sinks) override {
    const Tensor& kept_value = Op::from == From::nothing ? dy : kept(0);
    auto [dx, add] = sinks[0].place(dy.backend(), dy.shape(), dy.dtype());
    dispatch(dy.dtype(), name, [&, dx = dx, add = add]<class T> {
      const T *k = kept_value.data<T>(), *g = dy.data<T>();
      if (add) launch(dy.backend(), dy.elements(), Backward<Op, T, true>{functor, k, g, dx->template write<T>()});
      else launch(dy.backend(), dy.elements(), Backward<Op, T, false>{functor, k, g, dx->template write<T>()});
    });
  }
};

template <class Op>
Variable unary(const Variable& x, const Op& op) {
  Tensor y = Tensor::like(x.value());
  dispatch(x.dtype(), Op::name, [&]<class T> {
    launch(x.backend(), y.elements(), Forward<Op, T>{op, x.value().data<T>(), y.write<T>()});
  });
  return record<UnaryNode<Op>>(y, {&x}, {Op::from == From::x ? x.value() : Op::from == From::y ? y : Tensor()}, op);
}

struct CastNode : Node {
  static constexpr auto name = "cast";
  DType from;
  explicit CastNode(DType t) : Node(name), from(t) {}
  void backward(Tensor dy, std::span<Sink> sinks) override { sinks[0].give(dy.cast(from)); }
};

}  // namespace

Variable relu(const Variable& x) { return unary(x, Relu{}); }
Variable leaky_relu(const Variable& x, double slope) { return unary(x, LeakyRelu{slope}); }
Variable elu(const Variable& x, double alpha) { return unary(x, Elu{alpha}); }
Variable gelu(const Variable& x) { return unary(x, Gelu{}); }
Variable gelu_tanh(const Variable& x) { return unary(x, GeluTanh{}); }
Variable silu(const Variable& x) { return unary(x, Silu{}); }
Variable hardswish(const Variable& x) { return unary(x, Hardswish{}); }
Variable softplus(const Variable& x) { return unary(x, Softplus{}); }
Variable sigmoid(const Variable& x) { return unary(x, Sigmoid{}); }
Variable tanh(const Variable& x) { return unary(x, Tanh{}); }
Variable exp(const Variable& x) { return unary(x, Exp{}); }
Variable log(const Variable& x) { return unary(x, Log{}); }
Variable sqrt(const Variable& x) { return unary(x, Sqrt{}); }
Variable rsqrt(const Variable& x) { return unary(x, Rsqrt{}); }
Variable reciprocal(const Variable& x) { return unary(x, Reciprocal{}); }
Variable square(const Variable& x) { return unary(x, Square{}); }
Variable abs(const Variable& x) { return unary(x, Abs{}); }
Variable neg(const Variable& x) { return unary(x, Affine{-1, -0.0}); }  // adding −0 changes nothing, not even 0's sign
Variable sin(const Variable& x) { return unary(x, Sin{}); }
Variable cos(const Variable& x) { return unary(x, Cos{}); }
Variable clamp(const Variable& x, double low, double high) {
  require(low <= high, "clamp: low ", low, " is above high ", high);
  return unary(x, Clamp{low, high});
}
Variable scale(const Variable& x, double factor, double shift) { return unary(x, Affine{factor, shift}); }
Variable div_by(const Variable& x, double divisor) { return unary(x, DivideBy{divisor}); }
Variable power(const Variable& x, double exponent) { return unary(x, Power{exponent}); }
Variable cast(const Variable& x, DType dtype) {
  if (x.dtype() == dtype) return x;
  return record<CastNode>(x.value().cast(dtype), {&x}, {}, x.dtype());
}

}  // namespace tandem
