// Element-wise operations of two inputs, broadcast as in NumPy: shapes are aligned at their last axes, and an extent of 1 is
// stretched. An operation is a functor: f, and the two gradients da and db behind a gradient g of the result. Where an input was
// stretched, its gradient is the sum over the stretched axes.
//
// To add one: the functor here, a line in ops.h, a row in tests/test_op_table.cpp.
#include <cmath>

#include "autograd/ops.h"
#include "core/broadcast.h"

namespace tandem {
namespace {

struct Plus {
  static constexpr auto name = "add";
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
  // Not g·(1/b) and −a/b²: those overflow, or vanish, before the quotient does.
  template <class A> TANDEM_HD static A da(A g, A, A b) { return g / b; }
  template <class A> TANDEM_HD static A db(A g, A a, A b) { return -g * (a / b / b); }
};
// A NaN comes through, and both gradients pass it.
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

// ---- the template behind all of them ---------------------------------------------------------------------------------
template <class Op, class T>
struct Forward {
  const T *a, *b;
  T* y;
  TANDEM_HD void operator()(std::int64_t i, std::int64_t p, std::int64_t q) const {
    y[i] = T(Op::f(Accumulator<T>(a[p]), Accumulator<T>(b[q])));
  }
};
// The gradient of a or b at every element of y, before the sum over stretched axes.
template <class Op, class T, bool second, bool add>
struct Partial {
  const T *a, *b, *dy;
  T* out;
  TANDEM_HD void operator()(std::int64_t i, std::int64_t p, std::int64_t q) const {
    using A = Accumulator<T>;
    const A d = second ? Op::db(A(dy[i]), A(a[p]), A(b[q])) : Op::da(A(dy[i]), A(a[p]), A(b[q]));
    out[i] = T(add ? A(out[i]) + d : d);
  }
};

// Sums `full` (shape y) down to `shape`, over the axes along which it was stretched.
void sum_to(const Tensor& full, const Shape& shape, Tensor& out, bool add) {
  Shape p = padded(shape, full.rank());
  Tensor x = full;
  int axis = 0, rank = full.rank();
  std::int64_t outer = 1;
  while (true) {  // one run of stretched axes after the other
    while (axis < rank && (p[axis] == full.extent(axis))) outer *= p[axis++];
    std::int64_t middle = 1, inner = 1;
    while (axis < rank && p[axis] != full.extent(axis)) middle *= full.extent(axis++);
    int next = axis;
    while (next < rank && p[next] == full.extent(next)) next++;
    for (int i = axis; i < rank; i++) inner *= full.extent(i);
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

template <class Op>
struct BinaryNode : Node {
  static constexpr auto name = Op::name;
  Loops loops;
  Shape a_shape, b_shape;
  BinaryNode(const Loops& l, const Shape& a, const Shape& b) : Node(name), loops(l), a_shape(a), b_shape(b) {}

  template <bool second>
  void side(const Tensor& a, const Tensor& b, const Tensor& dy, Sink& sink, const Shape& shape) {
    bool whole = shape.elements() == dy.elements();
    Tensor full;
    Sink::Place place;
    if (whole) place = sink.place(dy.backend(), shape, dy.dtype());
    else full = Tensor(dy.backend(), dy.shape(), dy.dtype());
    Tensor& out = whole ? *place.tensor : full;
    dispatch(dy.dtype(), name, [&]<class T> {
      const T *p = a.data<T>(), *q = b.data<T>(), *g = dy.data<T>();
      if (place.add) launch_broadcast(dy.backend(), dy.elements(), loops, Partial<Op, T, second, true>{p, q, g, out.write<T>()});
      else launch_broadcast(dy.backend(), dy.elements(), loops, Partial<Op, T, second, false>{p, q, g, out.write<T>()});
    });
    if (!whole) {
      auto [dx, add] = sink.place(dy.backend(), shape, dy.dtype());
      sum_to(full, shape, *dx, add);
    }
  }

  void backward(Tensor dy, std::span<Sink> sinks) override {
    constexpr bool addition = std::is_same_v<Op, Plus>;
    if constexpr (addition) {  // the gradient passes unchanged: no copy where nothing was stretched
      const Shape* shapes[] = {&a_shape, &b_shape};
      for (int i = 0; i < 2; i++) {
        if (!sinks[i].wanted()) continue;
        if (shapes[i]->elements() == dy.elements()) {
          sinks[i].give(dy.reshape(*shapes[i]));
        } else {
          auto [dx, add] = sinks[i].place(dy.backend(), *shapes[i], dy.dtype());
          sum_to(dy, *shapes[i], *dx, add);
        }
      }
    } else {
      const Tensor &a = kept(0), &b = kept(1);
      if (sinks[0].wanted()) side<false>(a, b, dy, sinks[0], a_shape);
      if (sinks[1].wanted()) side<true>(a, b, dy, sinks[1], b_shape);
    }
  }
};

template <class Op>
Variable binary(const Variable& a, const Variable& b) {
  check_inputs(Op::name, a.value(), {}, {&b.value()});
  require(a.dtype() == b.dtype(), Op::name, ": ", name_of(a.dtype()), " and ", name_of(b.dtype()), ": cast one of them");
  Tensor y(a.backend(), broadcast_shape(Op::name, a.shape(), b.shape()), a.dtype());
  const Loops loops = loops_over(y.shape(), a.shape(), b.shape());
  dispatch(y.dtype(), Op::name, [&]<class T> {
    launch_broadcast(y.backend(), y.elements(), loops, Forward<Op, T>{a.value().data<T>(), b.value().data<T>(), y.write<T>()});
  });
  constexpr bool addition = std::is_same_v<Op, Plus>;
  return record<BinaryNode<Op>>(y, {&a, &b}, {addition ? Tensor() : a.value(), addition ? Tensor() : b.value()}, loops,
                                a.shape(), b.shape());
}

}  // namespace

Shape broadcast_shape(const char* op, const Shape& a, const Shape& b) {
  const int rank = std::max(a.rank(), b.rank());
  const Shape pa = padded(a, rank), pb = padded(b, rank);
  Shape y;
  for (int i = 0; i < rank; i++) {
    require(pa[i] == pb[i] || pa[i] == 1 || pb[i] == 1, op, ": the shapes ", a, " and ", b, " do not broadcast: extents ", pa[i],
            " and ", pb[i]);
    y.append(pa[i] == 1 ? pb[i] : pa[i]);
  }
  return y;
}

Variable add(const Variable& a, const Variable& b) { return binary<Plus>(a, b); }
Variable sub(const Variable& a, const Variable& b) { return binary<Minus>(a, b); }
Variable mul(const Variable& a, const Variable& b) { return binary<Times>(a, b); }
Variable div(const Variable& a, const Variable& b) { return binary<Over>(a, b); }
Variable maximum(const Variable& a, const Variable& b) { return binary<Maximum>(a, b); }
Variable minimum(const Variable& a, const Variable& b) { return binary<Minimum>(a, b); }
Variable pow(const Variable& a, const Variable& b) { return binary<Pow>(a, b); }

}  // namespace tandem
