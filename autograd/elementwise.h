// Element-wise operations of the library and of user programs. An operation is one functor. The template in this file
// makes the forward loop, the node and the backward loop from it, for every floating type and every device.
//
//   struct Softsign {
//     static constexpr auto name = "softsign";
//     static constexpr From from = From::x;
//     template <class A> TANDEM_HD A f(A x) const { return x / (1 + std::fabs(x)); }
//     template <class A> TANDEM_HD A df(A g, A x) const { A d = 1 + std::fabs(x); return g / (d * d); }
//   };
//   Variable softsign(const Variable& x) { return elementwise(Softsign{}, x); }
//
// A is the type of the arithmetic: float, or double for f64. g is the gradient of the result. A functor with members
// returns them from `Attributes attributes() const` (for ONNX and for records of a model). Use <cmath> with std:: and
// core/math.h. Include this file in a file whose name ends in .kernel.cpp, which nvcc compiles in a build with CUDA. In
// other files the operation runs on the CPU only (in examples/ the Makefile chooses the compiler).
#pragma once
#include "autograd/ops.h"
#include "core/broadcast.h"
#include "core/launch.h"

namespace tandem {

enum class From { x, y, nothing };  // df reads the input, the output, or neither; the tensor it reads is saved

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

template <class Op, class T, bool add>
struct UnaryBackward {
  Op op;
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
  void backward(Tensor dy, std::span<GradientSlot> slots) override {
    const Tensor& kept_value = Op::from == From::nothing ? dy : kept(0);
    auto [dx, add] = slots[0].destination(dy.backend(), dy.shape(), dy.dtype());
    dispatch(dy.dtype(), name, [&, dx = dx, add = add]<class T> {
      const T *k = kept_value.data<T>(), *g = dy.data<T>();
      if (add)
        launch(dy.backend(), dy.numel(), UnaryBackward<Op, T, true>{op, k, g, dx->template write<T>()});
      else
        launch(dy.backend(), dy.numel(), UnaryBackward<Op, T, false>{op, k, g, dx->template write<T>()});
    });
  }
};

template <class Op>
Variable elementwise(const Op& op, const Variable& x) {
  Tensor y = Tensor::like(x.value());
  dispatch(x.dtype(), Op::name, [&]<class T> {
    launch(x.backend(), y.numel(), UnaryForward<Op, T>{op, x.value().data<T>(), y.write<T>()});
  });
  return record<UnaryNode<Op>>(y, {&x}, {Op::from == From::x ? x.value() : Op::from == From::y ? y : Tensor()}, op);
}

// ---- two inputs, broadcast as in NumPy: f(a, b), and da(g, a, b) and db(g, a, b), the gradients of a and of b -------
// Both inputs are saved, unless the functor defines `from = From::nothing`: the gradient of both is then g (addition).
// Throws unless both inputs are on one backend and have one type
void check_pair(const char* op, const Variable& a, const Variable& b);
// Sums `full` to the shape `shape`, over the axes along which the input was broadcast.
void sum_to(const Tensor& full, const Shape& shape, Tensor& out, bool add);

template <class Op>
constexpr bool passes_gradient() {
  if constexpr (requires { Op::from; })
    return Op::from == From::nothing;
  else
    return false;
}

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
template <class Op, class T, bool second, bool add>
struct BinaryBackward {
  Op op;
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

  template <bool second>
  void side(const Tensor& a, const Tensor& b, const Tensor& dy, GradientSlot& slot) {
    const Shape& shape = shapes[second];
    bool whole = shape.numel() == dy.numel();
    Tensor full;
    GradientSlot::Destination destination;
    if (whole)
      destination = slot.destination(dy.backend(), shape, dy.dtype());
    else
      full = Tensor(dy.backend(), dy.shape(), dy.dtype());
    Tensor& out = whole ? *destination.tensor : full;
    dispatch(dy.dtype(), name, [&]<class T> {
      const T *p = a.data<T>(), *q = b.data<T>(), *g = dy.data<T>();
      auto run = [&]<bool add> {
        launch_broadcast(dy.backend(), dy.numel(), loops,
                         BinaryBackward<Op, T, second, add>{op, p, q, g, out.write<T>()});
      };
      destination.add ? run.template operator()<true>() : run.template operator()<false>();
    });
    if (!whole) {
      auto [dx, add] = slot.destination(dy.backend(), shape, dy.dtype());
      sum_to(full, shape, *dx, add);
    }
  }

  void backward(Tensor dy, std::span<GradientSlot> slots) override {
    if constexpr (passes_gradient<Op>()) {  // no copy where the input was not broadcast
      for (int i = 0; i < 2; i++) {
        if (!slots[i].wanted()) continue;
        if (shapes[i].numel() == dy.numel()) {
          slots[i].accumulate(dy.reshape(shapes[i]));
        } else {
          auto [dx, add] = slots[i].destination(dy.backend(), shapes[i], dy.dtype());
          sum_to(dy, shapes[i], *dx, add);
        }
      }
    } else {
      const Tensor &a = kept(0), &b = kept(1);
      if (slots[0].wanted()) side<false>(a, b, dy, slots[0]);
      if (slots[1].wanted()) side<true>(a, b, dy, slots[1]);
    }
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
  constexpr bool both = !passes_gradient<Op>();
  return record<BinaryNode<Op>>(y, {&a, &b}, {both ? a.value() : Tensor(), both ? b.value() : Tensor()}, op, loops,
                                a.shape(), b.shape());
}

}  // namespace tandem
