// Comparisons of two inputs, broadcast as in NumPy, and where(), whose mask is the result of a comparison.
#include <functional>

#include "autograd/elementwise.h"

namespace tandem {
namespace {

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

// x where the mask m is not 0 (inverted: where it is 0), else −0. Adding −0 changes no value.
struct Keep {
  static constexpr auto name = "where";
  bool inverted;
  Attributes attributes() const { return {{"inverted", {double(inverted)}}}; }
  TANDEM_HD auto f(auto x, auto m) const { return (m != 0) != inverted ? x : decltype(x)(-0.0); }
  TANDEM_HD auto da(auto g, auto, auto m) const { return (m != 0) != inverted ? g : 0; }
  TANDEM_HD auto db(auto g, auto, auto) const { return decltype(g)(0); }
};

}  // namespace

Tensor eq(const Variable& a, const Variable& b) { return compared<std::equal_to<>>("eq", a, b); }
Tensor ne(const Variable& a, const Variable& b) { return compared<std::not_equal_to<>>("ne", a, b); }
Tensor lt(const Variable& a, const Variable& b) { return compared<std::less<>>("lt", a, b); }
Tensor le(const Variable& a, const Variable& b) { return compared<std::less_equal<>>("le", a, b); }
Tensor gt(const Variable& a, const Variable& b) { return compared<std::less<>>("gt", b, a); }
Tensor ge(const Variable& a, const Variable& b) { return compared<std::less_equal<>>("ge", b, a); }

Variable where(const Tensor& mask, const Variable& a, const Variable& b) {
  require(mask.dtype() == DType::u8, "where: the mask has to be u8, as a comparison makes it, not ",
          name_of(mask.dtype()));
  check_pair("where", a, b);
  check_inputs("where", a.value(), {}, {&mask});
  const Variable m = mask.cast(a.dtype());
  return elementwise(Keep{false}, a, m) + elementwise(Keep{true}, b, m);
}

}  // namespace tandem
