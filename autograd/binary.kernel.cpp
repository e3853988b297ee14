// Element-wise operations of two inputs, broadcast as in NumPy: shapes are aligned at their last axes, and an extent of 1 is
// stretched. An operation is a functor: f, and the two partial derivatives da and db. Where an input was stretched, its
// gradient is the sum over the stretched axes.
//
// To add one: the functor here, a line in ops.h, a row in tests/test_op_table.cpp.
#include <cmath>

#include "autograd/ops.h"
#include "core/launch.h"

namespace tandem {
namespace {

struct Plus {
  static constexpr auto name = "add";
  template <class A> TANDEM_HD static A f(A a, A b) { return a + b; }
  template <class A> TANDEM_HD static A da(A, A) { return 1; }
  template <class A> TANDEM_HD static A db(A, A) { return 1; }
};
struct Minus {
  static constexpr auto name = "sub";
  template <class A> TANDEM_HD static A f(A a, A b) { return a - b; }
  template <class A> TANDEM_HD static A da(A, A) { return 1; }
  template <class A> TANDEM_HD static A db(A, A) { return -1; }
};
struct Times {
  static constexpr auto name = "mul";
  template <class A> TANDEM_HD static A f(A a, A b) { return a * b; }
  template <class A> TANDEM_HD static A da(A, A b) { return b; }
  template <class A> TANDEM_HD static A db(A a, A) { return a; }
};
struct Over {
  static constexpr auto name = "div";
  template <class A> TANDEM_HD static A f(A a, A b) { return a / b; }
  template <class A> TANDEM_HD static A da(A, A b) { return A(1) / b; }
  template <class A> TANDEM_HD static A db(A a, A b) { return -a / (b * b); }
};
struct Maximum {
  static constexpr auto name = "maximum";
  template <class A> TANDEM_HD static A f(A a, A b) { return a > b || a != a ? a : b; }  // a NaN comes through
  template <class A> TANDEM_HD static A da(A a, A b) { return a > b ? A(1) : a == b ? A(0.5) : A(0); }
  template <class A> TANDEM_HD static A db(A a, A b) { return da(b, a); }
};
struct Minimum {
  static constexpr auto name = "minimum";
  template <class A> TANDEM_HD static A f(A a, A b) { return a < b || a != a ? a : b; }
  template <class A> TANDEM_HD static A da(A a, A b) { return a < b ? A(1) : a == b ? A(0.5) : A(0); }
  template <class A> TANDEM_HD static A db(A a, A b) { return da(b, a); }
};
struct Pow {
  static constexpr auto name = "pow";
  template <class A> TANDEM_HD static A f(A a, A b) { return std::pow(a, b); }
  template <class A> TANDEM_HD static A da(A a, A b) { return b * std::pow(a, b - 1); }
  template <class A> TANDEM_HD static A db(A a, A b) { return std::pow(a, b) * std::log(a); }
};

// ---- the template behind all of them ---------------------------------------------------------------------------------
// How the flat index of the result finds the two elements: y as [outer, middle, inner], where a and b each step or stand
// still along each of the three. Equal shapes are one run; a bias over the last axis is two; anything that does not fold
// into three groups is refused by fold().
struct Walk {
  std::int64_t middle = 1, inner = 1;
  std::int64_t a_outer = 0, a_middle = 0, a_inner = 0, b_outer = 0, b_middle = 0, b_inner = 0;
  bool flat = true;  // neither is stretched
  TANDEM_HD std::int64_t a(std::int64_t i) const {
    return (i / inner / middle) * a_outer + (i / inner % middle) * a_middle + (i % inner) * a_inner;
  }
  TANDEM_HD std::int64_t b(std::int64_t i) const {
    return (i / inner / middle) * b_outer + (i / inner % middle) * b_middle + (i % inner) * b_inner;
  }
};

template <class Op, class T>
struct ForwardFlat {
  const T *a, *b;
  T* y;
  TANDEM_HD void operator()(std::int64_t i) const { y[i] = T(Op::f(Accumulator<T>(a[i]), Accumulator<T>(b[i]))); }
};
template <class Op, class T>
struct Forward {
  Walk w;
  const T *a, *b;
  T* y;
  TANDEM_HD void operator()(std::int64_t i) const { y[i] = T(Op::f(Accumulator<T>(a[w.a(i)]), Accumulator<T>(b[w.b(i)]))); }
};
// dy·∂f/∂a or ∂f/∂b at every element of y, before the sum over stretched axes.
template <class Op, class T, bool second, bool add>
struct Partial {
  Walk w;
  const T *a, *b, *dy;
  T* out;
  TANDEM_HD void operator()(std::int64_t i) const {
    using A = Accumulator<T>;
    A p = a[w.flat ? i : w.a(i)], q = b[w.flat ? i : w.b(i)];
    A g = A(dy[i]) * (second ? Op::db(p, q) : Op::da(p, q));
    out[i] = T(add ? A(out[i]) + g : g);
  }
};

struct Broadcast {
  Shape y;
  Walk walk;
};

Shape padded(const Shape& s, int rank) {
  Shape p;
  for (int i = s.rank(); i < rank; i++) p.append(1);
  for (std::int64_t e : s) p.append(e);
  return p;
}

Broadcast broadcast(const char* op, const Shape& a, const Shape& b) {
  int rank = std::max(a.rank(), b.rank());
  Shape pa = padded(a, rank), pb = padded(b, rank);
  Broadcast r;
  for (int i = 0; i < rank; i++) {
    require(pa[i] == pb[i] || pa[i] == 1 || pb[i] == 1, op, ": the shapes ", a, " and ", b, " do not broadcast: extents ", pa[i],
            " and ", pb[i]);
    r.y.append(pa[i] == 1 ? pb[i] : pa[i]);
  }
  // Neighbouring axes with the same pattern of stretching fold into one group.
  struct Group { std::int64_t extent; bool a, b; };
  std::vector<Group> groups;
  for (int i = 0; i < rank; i++) {
    if (r.y[i] == 1) continue;
    Group g{r.y[i], pa[i] != 1, pb[i] != 1};
    if (!groups.empty() && groups.back().a == g.a && groups.back().b == g.b) groups.back().extent *= g.extent;
    else groups.push_back(g);
  }
  require(groups.size() <= 3, op, ": broadcasting ", a, " with ", b, " alternates more than three times; reshape or split it");
  while (groups.size() < 3) groups.insert(groups.begin(), {1, true, true});
  Walk& w = r.walk;
  w.middle = groups[1].extent;
  w.inner = groups[2].extent;
  std::int64_t step_a = 1, step_b = 1;
  std::int64_t *a_steps[] = {&w.a_outer, &w.a_middle, &w.a_inner}, *b_steps[] = {&w.b_outer, &w.b_middle, &w.b_inner};
  for (int g = 2; g >= 0; g--) {
    *a_steps[g] = groups[g].a ? step_a : 0;
    *b_steps[g] = groups[g].b ? step_b : 0;
    if (groups[g].a) step_a *= groups[g].extent;
    if (groups[g].b) step_b *= groups[g].extent;
    w.flat = w.flat && groups[g].a && groups[g].b;
  }
  return r;
}

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
  Walk walk;
  Shape a_shape, b_shape;
  BinaryNode(const Walk& w, const Shape& a, const Shape& b) : Node(name), walk(w), a_shape(a), b_shape(b) {}

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
      if (place.add) launch(dy.backend(), dy.elements(), Partial<Op, T, second, true>{walk, p, q, g, out.write<T>()});
      else launch(dy.backend(), dy.elements(), Partial<Op, T, second, false>{walk, p, q, g, out.write<T>()});
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
  require(a.dtype() == b.dtype(), Op::name, ": ", name_of(a.dtype()), " and ", name_of(b.dtype()), ": cast one of them");
  Broadcast r = broadcast(Op::name, a.shape(), b.shape());
  Tensor y(a.backend(), r.y, a.dtype());
  dispatch(y.dtype(), Op::name, [&]<class T> {
    const T *p = a.value().data<T>(), *q = b.value().data<T>();
    if (r.walk.flat) launch(y.backend(), y.elements(), ForwardFlat<Op, T>{p, q, y.write<T>()});
    else launch(y.backend(), y.elements(), Forward<Op, T>{r.walk, p, q, y.write<T>()});
  });
  constexpr bool addition = std::is_same_v<Op, Plus>;
  return record<BinaryNode<Op>>(y, {&a, &b}, {addition ? Tensor() : a.value(), addition ? Tensor() : b.value()}, r.walk,
                                a.shape(), b.shape());
}

}  // namespace

Variable add(const Variable& a, const Variable& b) { return binary<Plus>(a, b); }
Variable sub(const Variable& a, const Variable& b) { return binary<Minus>(a, b); }
Variable mul(const Variable& a, const Variable& b) { return binary<Times>(a, b); }
Variable div(const Variable& a, const Variable& b) { return binary<Over>(a, b); }
Variable maximum(const Variable& a, const Variable& b) { return binary<Maximum>(a, b); }
Variable minimum(const Variable& a, const Variable& b) { return binary<Minimum>(a, b); }
Variable pow(const Variable& a, const Variable& b) { return binary<Pow>(a, b); }

}  // namespace tandem
