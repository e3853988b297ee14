// Sums, means and maxima over any set of axes. Neighbouring axes are reduced at once. A set with gaps is reduced run by
// run, the last run first, so that earlier positions stay valid.
#include <vector>

#include "autograd/ops.h"
#include "core/broadcast.h"
#include "core/launch.h"

namespace tandem {
namespace {

struct Reduced {
  std::vector<bool> reduced;
  Shape kept;     // sizes of reduced axes set to 1
  Shape dropped;  // reduced axes left out
  std::int64_t count = 1;
};

Reduced resolve(const char* op, const Shape& x, Axes axes) {
  Reduced a;
  a.reduced.assign(x.rank(), axes.size() == 0);
  for (int axis : axes) {
    const int i = x.axis(op, axis);
    require(!a.reduced[i], op, ": the axis ", axis, " is named twice");
    a.reduced[i] = true;
  }
  for (int i = 0; i < x.rank(); i++) {
    a.kept.append(a.reduced[i] ? 1 : x[i]);
    if (a.reduced[i])
      a.count *= x[i];
    else
      a.dropped.append(x[i]);
  }
  return a;
}

Tensor reduce_runs(Reduction op, const Tensor& input, const Reduced& axes) {
  Tensor x = input;
  Shape shape = input.shape();
  for (int i = shape.rank() - 1; i >= 0; i--) {
    if (!axes.reduced[i]) continue;
    int last = i;
    while (i > 0 && axes.reduced[i - 1]) i--;
    std::int64_t outer = 1, middle = 1, inner = 1;
    for (int k = 0; k < shape.rank(); k++) (k < i ? outer : k <= last ? middle : inner) *= shape[k];
    Tensor y(x.backend(), {outer * inner}, x.dtype());
    x.backend().reduce(op, outer, middle, inner, x, y, false);
    x = y;
    for (int k = i; k <= last; k++) shape[k] = 1;
  }
  return x.same_memory(input) ? input.clone() : x;
}

// Below, i is the place of an element of x, and p that of its result, which is broadcast to x's shape.
template <class T>
struct BroadcastGradient {  // dx = factor·dy, stretched
  double factor;
  bool add;
  const T* dy;
  T* dx;
  TANDEM_HD void operator()(std::int64_t i, std::int64_t p, std::int64_t) const {
    using A = Accumulator<T>;
    A g = A(factor) * A(dy[p]);
    dx[i] = T(add ? A(dx[i]) + g : g);
  }
};

template <class T>
struct IsLargest {  // 1 where x is its group's maximum
  const T *x, *y;
  T* out;
  TANDEM_HD void operator()(std::int64_t i, std::int64_t p, std::int64_t) const {
    out[i] = T(Accumulator<T>(x[i]) == Accumulator<T>(y[p]) ? 1 : 0);
  }
};

template <class T>
struct MaxGradient {  // dx = dy / ties where x is its group's maximum
  bool add;
  const T *dy, *ties, *largest;
  T* dx;
  TANDEM_HD void operator()(std::int64_t i, std::int64_t p, std::int64_t) const {
    using A = Accumulator<T>;
    A g = A(largest[i]) * A(dy[p]) / A(ties[p]);
    dx[i] = T(add ? A(dx[i]) + g : g);
  }
};

struct SumNode : Node {
  static constexpr auto name = "sum";
  Shape full, kept_shape;
  double factor;
  SumNode(const Shape& f, const Shape& k, double scale) : Node(name), full(f), kept_shape(k), factor(scale) {}
  void backward(Tensor dy, std::span<GradientSlot> slots) override {
    auto [dx, add] = slots[0].destination(dy.backend(), full, dy.dtype());
    dispatch(dy.dtype(), name, [&, dx = dx, add = add]<class T> {
      launch_broadcast(dy.backend(), full.numel(), loops_over(full, kept_shape, full),
                       BroadcastGradient<T>{factor, add, dy.data<T>(), dx->template write<T>()});
    });
  }
};

struct MaxNode : Node {
  static constexpr auto name = "max";
  Reduced axes;
  explicit MaxNode(const Reduced& a) : Node(name), axes(a) {}
  void backward(Tensor dy, std::span<GradientSlot> slots) override {
    const Tensor &x = kept(0), &y = kept(1);
    Tensor largest = Tensor::like(x);
    const Loops loops = loops_over(x.shape(), axes.kept, x.shape());
    dispatch(x.dtype(), name, [&]<class T> {
      launch_broadcast(x.backend(), x.numel(), loops, IsLargest<T>{x.data<T>(), y.data<T>(), largest.write<T>()});
    });
    Tensor ties = reduce_runs(Reduction::sum, largest, axes);
    auto [dx, add] = slots[0].destination(x.backend(), x.shape(), x.dtype());
    dispatch(x.dtype(), name, [&, dx = dx, add = add]<class T> {
      launch_broadcast(x.backend(), x.numel(), loops,
                       MaxGradient<T>{add, dy.data<T>(), ties.data<T>(), largest.data<T>(), dx->template write<T>()});
    });
  }
};

Variable sum_scaled(const char* op, const Variable& x, Axes axes, bool keepdim, bool mean) {
  Reduced a = resolve(op, x.shape(), axes);
  require(!mean || a.count > 0, op, ": the mean of no elements, shape ", x.shape());
  double factor = mean ? 1.0 / double(a.count) : 1.0;
  Tensor y = reduce_runs(Reduction::sum, x.value(), a).reshape(keepdim ? a.kept : a.dropped);
  if (mean) {
    NoGrad off;
    y = scale(Variable(y), factor).value();
  }
  return record<SumNode>(y, {&x}, {}, x.shape(), a.kept, factor);
}

}  // namespace

Variable sum(const Variable& x, Axes axes, bool keepdim) { return sum_scaled("sum", x, axes, keepdim, false); }

Variable mean(const Variable& x, Axes axes, bool keepdim) { return sum_scaled("mean", x, axes, keepdim, true); }

Variable max(const Variable& x, Axes axes, bool keepdim) {
  Reduced a = resolve("max", x.shape(), axes);
  require(a.count > 0, "max: the maximum of no elements, shape ", x.shape());
  Tensor y = reduce_runs(Reduction::max, x.value(), a).reshape(keepdim ? a.kept : a.dropped);
  return record<MaxNode>(y, {&x}, {x.value(), y}, a);
}

}  // namespace tandem
