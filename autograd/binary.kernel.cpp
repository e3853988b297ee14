// Element-wise operations of two inputs, broadcast as in NumPy: a functor and a function each (autograd/elementwise.h).
//
// A new operation needs a functor here, a line in ops.h, and a row in tests/op_table.cpp.
#include <cmath>

#include "autograd/elementwise.h"

namespace tandem {
namespace {

struct Plus {
  static constexpr auto name = "add";
  static constexpr From from = From::nothing;
  TANDEM_HD auto f(auto a, auto b) const { return a + b; }
};
struct Minus {
  static constexpr auto name = "sub";
  TANDEM_HD auto f(auto a, auto b) const { return a - b; }
  TANDEM_HD auto da(auto g, auto, auto) const { return g; }
  TANDEM_HD auto db(auto g, auto, auto) const { return -g; }
};
struct Times {
  static constexpr auto name = "mul";
  TANDEM_HD auto f(auto a, auto b) const { return a * b; }
  TANDEM_HD auto da(auto g, auto, auto b) const { return g * b; }
  TANDEM_HD auto db(auto g, auto a, auto) const { return g * a; }
};
struct Over {
  static constexpr auto name = "div";
  TANDEM_HD auto f(auto a, auto b) const { return a / b; }
  // Not computed as g·(1/b) and −a/b²: these overflow or underflow where the quotient does not.
  TANDEM_HD auto da(auto g, auto, auto b) const { return g / b; }
  TANDEM_HD auto db(auto g, auto a, auto b) const { return -g * (a / b / b); }
};
// If an operand is NaN, the result is NaN and both gradients are g.
struct Maximum {
  static constexpr auto name = "maximum";
  TANDEM_HD auto f(auto a, auto b) const { return a > b || a != a ? a : b; }
  TANDEM_HD auto da(auto g, auto a, auto b) const { return a < b ? 0 : a == b ? g / 2 : g; }
  TANDEM_HD auto db(auto g, auto a, auto b) const { return da(g, b, a); }
};
struct Minimum {
  static constexpr auto name = "minimum";
  TANDEM_HD auto f(auto a, auto b) const { return a < b || a != a ? a : b; }
  TANDEM_HD auto da(auto g, auto a, auto b) const { return a > b ? 0 : a == b ? g / 2 : g; }
  TANDEM_HD auto db(auto g, auto a, auto b) const { return da(g, b, a); }
};
struct Pow {
  static constexpr auto name = "pow";
  TANDEM_HD auto f(auto a, auto b) const { return std::pow(a, b); }
  TANDEM_HD auto da(auto g, auto a, auto b) const { return b == 0 ? 0 : g * (b * std::pow(a, b - 1)); }
  TANDEM_HD auto db(auto g, auto a, auto b) const { return a == 0 && b >= 0 ? 0 : g * (std::pow(a, b) * std::log(a)); }
};

}  // namespace

void check_pair(const char* op, const Variable& a, const Variable& b) {
  check_inputs(op, a.value(), {}, {&b.value()});
  require(a.dtype() == b.dtype(), op, ": ", name_of(a.dtype()), " and ", name_of(b.dtype()), ": cast one of them");
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
