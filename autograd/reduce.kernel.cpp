// Sums, means and maxima over any set of axes. Neighbouring axes are reduced at once. A set with gaps is reduced run by
// run, the last run first, so that the positions of earlier axes do not change.
#include <vector>

#include "autograd/elementwise.h"
#include "core/elementwise.h"

namespace tandem {
namespace {

struct Reduced {
  Shape kept;     // sizes of reduced axes set to 1
  Shape dropped;  // reduced axes left out
  std::int64_t count = 1;
};

Reduced resolve(const char* op, const Shape& x, Axes axes) {
  Reduced a;
  std::vector<bool> reduced(std::size_t(x.rank()), axes.empty());
  for (int axis : axes) {
    const int i = x.axis(op, axis);
    require(!reduced[i], op, ": the axis ", axis, " is named twice");
    reduced[i] = true;
  }
  for (int i = 0; i < x.rank(); i++) {
    a.kept.append(reduced[i] ? 1 : x[i]);
    if (reduced[i])
      a.count *= x[i];
    else
      a.dropped.append(x[i]);
  }
  return a;
}

// y = x reduced over the axes of size 1 in `kept`.
void reduce_to(Reduction op, Tensor x, const Shape& kept, Tensor& y, bool add) {
  Shape shape = x.shape();
  const auto leaves = [&](int i) { return shape[i] != kept[i]; };
  for (int last = shape.rank() - 1; last >= 0; last--) {
    if (!leaves(last)) continue;
    int first = last;
    while (first > 0 && (leaves(first - 1) || shape[first - 1] == 1)) first--;
    const std::int64_t outer = shape.outer(first), inner = shape.inner(last);
    std::int64_t middle = 1;
    for (int i = first; i <= last; i++) middle *= std::exchange(shape[i], 1);
    if (shape == kept) return x.backend().reduce(op, outer, middle, inner, x, y, add);
    Tensor part(x.backend(), {outer * inner}, x.dtype());
    x.backend().reduce(op, outer, middle, inner, x, part, false);
    x = part;
    last = first;
  }
  if (add)
    add_into(y, x);
  else
    y.copy_from(x);
}

Tensor reduced(Reduction op, const Tensor& x, const Shape& kept) {
  Tensor y(x.backend(), kept, x.dtype());
  reduce_to(op, x, kept, y, false);
  return y;
}

// dx = factor·dy, broadcast to the shape of x: i is the position of an element of x, and p that of its sum.
template <class T>
struct SumGradient {
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

struct SumNode : Node {
  static constexpr auto name = "sum";
  Shape full, kept_shape;
  double factor;
  SumNode(const Shape& f, const Shape& k, double scale) : Node(name), full(f), kept_shape(k), factor(scale) {}
  void backward(Tensor dy, std::span<GradientSlot> slots) override {
    auto [dx, add] = slots[0].destination(dy.backend(), full, dy.dtype());
    dispatch(dy.dtype(), name, [&, dx = dx, add = add]<class T> {
      launch_broadcast(dy.backend(), full.numel(), loops_over(full, kept_shape, full),
                       SumGradient<T>{factor, add, dy.data<T>(), dx->template write<T>()});
    });
  }
};

struct MaxNode : Node {
  static constexpr auto name = "max";
  Shape kept_shape;
  explicit MaxNode(const Shape& k) : Node(name), kept_shape(k) {}
  void backward(Tensor dy, std::span<GradientSlot> slots) override {
    NoGrad off;
    const Variable x(kept(0)), y(kept(1).reshape(kept_shape)), largest = cast(Variable(eq(x, y)), x.dtype());
    const Variable ties(reduced(Reduction::sum, largest.value(), kept_shape));
    slots[0].accumulate((largest * (Variable(dy.reshape(kept_shape)) / ties)).value());
  }
};

Variable sum_scaled(const char* op, const Variable& x, Axes axes, bool keepdim, bool mean) {
  Reduced a = resolve(op, x.shape(), axes);
  require(!mean || a.count > 0, op, ": the mean of no elements, shape ", x.shape());
  double factor = mean ? 1.0 / double(a.count) : 1.0;
  Tensor y = reduced(Reduction::sum, x.value(), a.kept).reshape(keepdim ? a.kept : a.dropped);
  if (mean) {
    NoGrad off;
    y = scale(Variable(y), factor).value();
  }
  return record<SumNode>(y, {&x}, {}, x.shape(), a.kept, factor);
}

}  // namespace

void sum_to(const Tensor& full, const Shape& shape, Tensor& out, bool add) {
  reduce_to(Reduction::sum, full, padded(shape, full.rank()), out, add);
}

Variable sum(const Variable& x, Axes axes, bool keepdim) { return sum_scaled("sum", x, axes, keepdim, false); }

Variable mean(const Variable& x, Axes axes, bool keepdim) { return sum_scaled("mean", x, axes, keepdim, true); }

Variable max(const Variable& x, Axes axes, bool keepdim) {
  Reduced a = resolve("max", x.shape(), axes);
  require(a.count > 0, "max: the maximum of no elements, shape ", x.shape());
  Tensor y = reduced(Reduction::max, x.value(), a.kept).reshape(keepdim ? a.kept : a.dropped);
  return record<MaxNode>(y, {&x}, {x.value(), y}, a.kept);
}

}  // namespace tandem
