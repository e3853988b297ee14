// Element-wise operations of the library and of user programs. An operation is one functor. The template in this file
// makes the forward loop, the node and the backward loop from it, for every floating type and every device.
//
//   struct Softsign {
//     static constexpr auto name = "softsign";
//     TANDEM_HD auto f(auto x) const { return x / (1 + std::fabs(x)); }
//     TANDEM_HD auto df(auto g, auto x) const { return g / ((1 + std::fabs(x)) * (1 + std::fabs(x))); }
//   };
//   Variable softsign(const Variable& x) { return elementwise(Softsign{}, x); }
//
// x is a float, or a double for f64. Convert a constant that is no integer to the type of x: decltype(x)(0.1). g is the
// gradient of the result. df reads the input, or the tensor that `static constexpr From from` selects. A functor with
// members returns them from `Attributes attributes() const` (for ONNX and for records of a model). Use <cmath> with
// std:: and core/math.h. Include this file in a file whose name ends in .kernel.cpp, which nvcc compiles in a build
// with CUDA. In other files the operation runs on the CPU only (in examples/ the Makefile chooses the compiler).
#pragma once
#include "autograd/ops.h"
#include "core/broadcast.h"
#include "core/launch.h"

namespace tandem {

enum class From { x, y, nothing };  // df reads the input, the output, or neither; the tensor it reads is saved

template <class Op>
constexpr From from_of() {
  if constexpr (requires { Op::from; })
    return Op::from;
  else
    return From::x;
}

template <class Op>
Attributes attributes_of(const Op& op) {
  if constexpr (requires { op.attributes(); })
    return op.attributes();
  else
    return {};
}

// ---- one input: f(x), and df(g, x or y), the gradient g·f′ ----------------------------------------------------------
template <class Op, class T>
struct UnaryForward {
  Op op;
  const T* x;
  T* y;
  TANDEM_HD T value(std::int64_t i) const { return T(op.f(Accumulator<T>(x[i]))); }
  TANDEM_HD void store(std::int64_t i, T v) const { y[i] = v; }
  TANDEM_HD void operator()(std::int64_t i) const { store(i, value(i)); }
};

template <class Op, class T>
struct UnaryBackward {
  Op op;
  bool add;
  const T *kept, *dy;
  T* dx;
  TANDEM_HD T value(std::int64_t i) const {
    using A = Accumulator<T>;
    A g = op.df(A(dy[i]), A(kept[i]));
    return T(add ? A(dx[i]) + g : g);
  }
  TANDEM_HD void store(std::int64_t i, T v) const { dx[i] = v; }
  TANDEM_HD void operator()(std::int64_t i) const { store(i, value(i)); }
};

template <class Op>
struct UnaryNode : Node {
  static constexpr auto name = Op::name;
  Op op;
  explicit UnaryNode(const Op& f) : Node(name), op(f) {}
  Attributes attributes() const override { return attributes_of(op); }
  Recomputation recompute(Operands in) const override {
    return {{in[0]->value()}, [f = op](std::span<const Tensor> s) { return elementwise(f, Variable(s[0])).value(); }};
  }
  void backward(Tensor dy, std::span<GradientSlot> slots) override {
    const Tensor& kept_value = from_of<Op>() == From::nothing ? dy : kept(0);
    auto [dx, add] = slots[0].destination(dy.backend(), dy.shape(), dy.dtype());
    dispatch(dy.dtype(), name, [&, dx = dx, add = add]<class T> {
      launch(dy.backend(), dy.numel(),
             UnaryBackward<Op, T>{op, add, kept_value.data<T>(), dy.data<T>(), dx->template write<T>()});
    });
  }
};

template <class Op>
Variable elementwise(const Op& op, const Variable& x) {
  Tensor y = Tensor::like(x.value());
  dispatch(x.dtype(), Op::name, [&]<class T> {
    launch(x.backend(), y.numel(), UnaryForward<Op, T>{op, x.value().data<T>(), y.write<T>()});
  });
  constexpr From from = from_of<Op>();
  return record<UnaryNode<Op>>(y, {&x}, {from == From::x ? x.value() : from == From::y ? y : Tensor()}, op);
}

// ---- two inputs, broadcast as in NumPy: f(a, b), and da(g, a, b) and db(g, a, b), the gradients of a and of b -------
// Both inputs are saved, unless the functor defines `from = From::nothing`: the gradient of both is then g (addition).
// Throws unless both inputs are on one backend and have one type
void check_pair(const char* op, const Variable& a, const Variable& b);
// Sums `full` to the shape `shape`, over the axes along which the input was broadcast.
void sum_to(const Tensor& full, const Shape& shape, Tensor& out, bool add);

template <class Op, class T>
struct BinaryForward {
  Op op;
  const T *a, *b;
  T* y;
  TANDEM_HD void operator()(std::int64_t i, std::int64_t p, std::int64_t q) const {
    y[i] = T(op.f(Accumulator<T>(a[p]), Accumulator<T>(b[q])));
  }
};

// The gradient of a or b at every element of y, before the sum over broadcast axes.
template <class Op, class T, bool second>
struct BinaryBackward {
  Op op;
  bool add;
  const T *a, *b, *dy;
  T* out;
  TANDEM_HD void operator()(std::int64_t i, std::int64_t p, std::int64_t q) const {
    using A = Accumulator<T>;
    const A d = second ? op.db(A(dy[i]), A(a[p]), A(b[q])) : op.da(A(dy[i]), A(a[p]), A(b[q]));
    out[i] = T(add ? A(out[i]) + d : d);
  }
};

template <class Op>
struct BinaryNode : Node {
  static constexpr auto name = Op::name;
  Op op;
  Loops loops;
  Shape shapes[2];
  BinaryNode(const Op& f, const Loops& l, const Shape& a, const Shape& b) : Node(name), op(f), loops(l), shapes{a, b} {}
  Attributes attributes() const override { return attributes_of(op); }
  Recomputation recompute(Operands in) const override {
    return {{in[0]->value(), in[1]->value()},
            [f = op](std::span<const Tensor> s) { return elementwise(f, Variable(s[0]), Variable(s[1])).value(); }};
  }

  void backward(Tensor dy, std::span<GradientSlot> slots) override {
    constexpr bool passes_dy = from_of<Op>() == From::nothing;
    for (int i = 0; i < 2; i++) {
      if (!slots[i].wanted()) continue;
      const bool whole = shapes[i].numel() == dy.numel();  // not broadcast
      if (passes_dy && whole) {
        slots[i].accumulate(dy.reshape(shapes[i]));  // no copy
        continue;
      }
      Tensor full = whole || passes_dy ? dy : Tensor::like(dy);
      auto [dx, add] = slots[i].destination(dy.backend(), shapes[i], dy.dtype());
      if constexpr (!passes_dy) gradient(i == 1, dy, whole ? *dx : full, whole && add);
      if (!whole) sum_to(full, shapes[i], *dx, add);
    }
  }
  void gradient(bool second, const Tensor& dy, Tensor& out, bool add) {
    dispatch(dy.dtype(), name, [&]<class T> {
      auto run = [&]<bool of_b> {
        launch_broadcast(dy.backend(), dy.numel(), loops,
                         BinaryBackward<Op, T, of_b>{op, add, kept(0).template data<T>(), kept(1).template data<T>(),
                                                     dy.template data<T>(), out.template write<T>()});
      };
      second ? run.template operator()<true>() : run.template operator()<false>();
    });
  }
};

template <class Op>
Variable elementwise(const Op& op, const Variable& a, const Variable& b) {
  check_pair(Op::name, a, b);
  Tensor y(a.backend(), broadcast_shape(Op::name, a.shape(), b.shape()), a.dtype());
  const Loops loops = loops_over(y.shape(), a.shape(), b.shape());
  dispatch(y.dtype(), Op::name, [&]<class T> {
    launch_broadcast(y.backend(), y.numel(), loops,
                     BinaryForward<Op, T>{op, a.value().data<T>(), b.value().data<T>(), y.write<T>()});
  });
  constexpr bool both = from_of<Op>() != From::nothing;
  return record<BinaryNode<Op>>(y, {&a, &b}, {both ? a.value() : Tensor(), both ? b.value() : Tensor()}, op, loops,
                                a.shape(), b.shape());
}

}  // namespace tandem
