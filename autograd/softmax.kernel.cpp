// softmax and its logarithm, row by row: y_c = e^(x_c − m) / Σ e^(x − m) with m the largest of the row, so that nothing
// overflows.
#include <cmath>
#include <numeric>

#include "autograd/ops.h"
#include "core/launch.h"
#include "core/math.h"

namespace tandem {
namespace {

template <class T, bool log>
struct Softmax {
  std::int64_t n;
  const T* x;
  T* y;
  template <class Lanes>
  TANDEM_HD void operator()(std::int64_t row, const Lanes& lanes) const {
    using A = Accumulator<T>;
    const T* from = x + row * n;
    T* to = y + row * n;
    const A largest = lanes.max(n, [=](std::int64_t c) { return A(from[c]); });
    const A sum = lanes.sum(n, [=](std::int64_t c) { return exponential(A(from[c]) - largest); });
    const A log_sum = std::log(sum);
    lanes.each(n, [=](std::int64_t c) {
      const A d = A(from[c]) - largest;
      to[c] = T(log ? d - log_sum : exponential(d) / sum);
    });
  }
};

// dx = y·(dy − Σ dy·y); of the logarithm dx = dy − e^y·Σ dy.
template <class T, bool log>
struct SoftmaxBackward {
  std::int64_t n;
  bool add;
  const T *y, *dy;
  T* dx;
  template <class Lanes>
  TANDEM_HD void operator()(std::int64_t row, const Lanes& lanes) const {
    using A = Accumulator<T>;
    const T *p = y + row * n, *g = dy + row * n;
    T* to = dx + row * n;
    const bool adds = add;
    const A sum = lanes.sum(n, [=](std::int64_t c) { return log ? A(g[c]) : A(g[c]) * A(p[c]); });
    lanes.each(n, [=](std::int64_t c) {
      const A d = log ? A(g[c]) - exponential(A(p[c])) * sum : A(p[c]) * (A(g[c]) - sum);
      to[c] = T(adds ? A(to[c]) + d : d);
    });
  }
};

template <bool log>
struct SoftmaxNode : Node {
  static constexpr auto name = log ? "log_softmax" : "softmax";
  SoftmaxNode() : Node(name) {}
  void backward(Tensor dy, std::span<GradientSlot> slots) override {
    const Tensor& y = kept(0);
    auto [dx, add] = slots[0].destination(dy.backend(), y.shape(), y.dtype());
    const std::int64_t n = y.size(-1), rows = y.numel() / n;
    dispatch(y.dtype(), name, [&, dx = dx, add = add]<class T> {
      launch_rows(dy.backend(), rows, n,
                  SoftmaxBackward<T, log>{n, add, y.data<T>(), dy.data<T>(), dx->template write<T>()});
    });
  }
};

template <bool log>
Variable softmax_along(const Variable& x, int axis) {
  const char* name = SoftmaxNode<log>::name;
  const int a = x.shape().axis(name, axis), last = x.rank() - 1;
  require(x.size(a) > 0, name, ": the axis ", axis, " of the shape ", x.shape(), " has no elements");
  if (a != last) {
    std::vector<int> order(std::size_t(x.rank()));
    std::iota(order.begin(), order.end(), 0);
    std::swap(order[std::size_t(a)], order[std::size_t(last)]);
    return transpose(softmax_along<log>(transpose(x, order), last), order);
  }
  Tensor y = Tensor::like(x.value());
  const std::int64_t n = x.size(-1);
  dispatch(x.dtype(), name, [&]<class T> {
    launch_rows(x.backend(), y.numel() / n, n, Softmax<T, log>{n, x.value().data<T>(), y.write<T>()});
  });
  return record<SoftmaxNode<log>>(y, {&x}, {y});
}

}  // namespace

Variable softmax(const Variable& x, int axis) { return softmax_along<false>(x, axis); }
Variable log_softmax(const Variable& x, int axis) { return softmax_along<true>(x, axis); }

}  // namespace tandem
