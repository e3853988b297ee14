// Element-wise operations of two inputs, broadcast as in NumPy: a functor and a function each (autograd/elementwise.h).
//
// To add one: the functor here, a line in ops.h, a row in tests/op_table.cpp.
#include <cmath>

#include "autograd/elementwise.h"

namespace tandem {
namespace {

struct Plus {
  static constexpr auto name = "add";
  static constexpr From from = From::nothing;
  template <class A>
  TANDEM_HD static A f(A a, A b) {
    return a + b;
  }
  template <class A>
  TANDEM_HD static A da(A g, A, A) {
    return g;
  }
  template <class A>
  TANDEM_HD static A db(A g, A, A) {
    return g;
  }
};
struct Minus {
  static constexpr auto name = "sub";
  template <class A>
  TANDEM_HD static A f(A a, A b) {
    return a - b;
  }
  template <class A>
  TANDEM_HD static A da(A g, A, A) {
    return g;
  }
  template <class A>
  TANDEM_HD static A db(A g, A, A) {
    return -g;
  }
};
struct Times {
  static constexpr auto name = "mul";
  template <class A>
  TANDEM_HD static A f(A a, A b) {
    return a * b;
  }
  template <class A>
  TANDEM_HD static A da(A g, A, A b) {
    return g * b;
  }
  template <class A>
  TANDEM_HD static A db(A g, A a, A) {
    return g * a;
  }
};
struct Over {
  static constexpr auto name = "div";
  template <class A>
  TANDEM_HD static A f(A a, A b) {
    return a / b;
  }
  // Not g·(1/b) and −a/b²: these overflow or underflow where the quotient does not.
  template <class A>
  TANDEM_HD static A da(A g, A, A b) {
    return g / b;
  }
  template <class A>
  TANDEM_HD static A db(A g, A a, A b) {
    return -g * (a / b / b);
  }
};
// Passes a NaN on, in both gradients too.
struct Maximum {
  static constexpr auto name = "maximum";
  template <class A>
  TANDEM_HD static A f(A a, A b) {
    return a > b || a != a ? a : b;
  }
  template <class A>
  TANDEM_HD static A da(A g, A a, A b) {
    return a < b ? A(0) : a == b ? g / 2 : g;
  }
  template <class A>
  TANDEM_HD static A db(A g, A a, A b) {
    return da(g, b, a);
  }
};
struct Minimum {
  static constexpr auto name = "minimum";
  template <class A>
  TANDEM_HD static A f(A a, A b) {
    return a < b || a != a ? a : b;
  }
  template <class A>
  TANDEM_HD static A da(A g, A a, A b) {
    return a > b ? A(0) : a == b ? g / 2 : g;
  }
  template <class A>
  TANDEM_HD static A db(A g, A a, A b) {
    return da(g, b, a);
  }
};
struct Pow {
  static constexpr auto name = "pow";
  template <class A>
  TANDEM_HD static A f(A a, A b) {
    return std::pow(a, b);
  }
  template <class A>
  TANDEM_HD static A da(A g, A a, A b) {
    return b == 0 ? A(0) : g * (b * std::pow(a, b - 1));
  }
  template <class A>
  TANDEM_HD static A db(A g, A a, A b) {
    return a == 0 && b >= 0 ? A(0) : g * (std::pow(a, b) * std::log(a));
  }
};

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
    require(pa[i] == pb[i] || pa[i] == 1 || pb[i] == 1, op, ": the shapes ", a, " and ", b, " do not broadcast: sizes ",
            pa[i], " and ", pb[i]);
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

}  // namespace tandem
