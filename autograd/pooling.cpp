// Pooling. Max pooling saves the argmax index of each window in one byte per output. Backward adds the gradient to that
// element only.
#include "autograd/ops.h"
#include "core/backend.h"

namespace tandem {
namespace {

Attributes describe(const PoolShape& s, bool relu) {
  return {{"window", {double(s.kh), double(s.kw)}},
          {"stride", {double(s.stride_h), double(s.stride_w)}},
          {"padding", {double(s.pad_h), double(s.pad_w)}},
          {"relu", {double(relu)}}};
}

struct MaxPoolNode : Node {
  static constexpr auto name = "max_pool2d";
  PoolShape s;
  bool relu;
  MaxPoolNode(const PoolShape& shape, bool r) : Node(name), s(shape), relu(r) {}
  Attributes attributes() const override { return describe(s, relu); }
  void backward(Tensor dy, std::span<GradientSlot> slots) override {
    const Tensor& argmax = kept(0);
    auto [dx, add] = slots[0].destination(dy.backend(), {s.n, s.h, s.w, s.c}, dy.dtype());
    dy.backend().max_pool_backward(s, dy, argmax, *dx, add);
  }
};

struct AveragePoolNode : Node {
  static constexpr auto name = "average_pool2d";
  PoolShape s;
  explicit AveragePoolNode(const PoolShape& shape) : Node(name), s(shape) {}
  Attributes attributes() const override { return describe(s, false); }
  void backward(Tensor dy, std::span<GradientSlot> slots) override {
    auto [dx, add] = slots[0].destination(dy.backend(), {s.n, s.h, s.w, s.c}, dy.dtype());
    dy.backend().average_pool_backward(s, dy, *dx, add);
  }
};

PoolShape pool_shape(const char* op, const Variable& x, const Pool2dOptions& o) {
  require(x.rank() == 4, op, ": input ", x.shape(), " must be [N,H,W,C]");
  std::int64_t stride = o.stride ? o.stride : o.kernel_size;
  require(o.kernel_size >= 1 && stride >= 1 && o.padding >= 0, op, ": window ", o.kernel_size, ", stride ", stride,
          ", padding ", o.padding, " are out of range");
  require(2 * o.padding <= o.kernel_size, op, ": padding ", o.padding, " is more than half of the window ",
          o.kernel_size);
  require(x.size(1) + 2 * o.padding >= o.kernel_size && x.size(2) + 2 * o.padding >= o.kernel_size, op, ": a ",
          o.kernel_size, "×", o.kernel_size, " window does not fit input ", x.shape());
  return {x.size(0),     x.size(1), x.size(2), x.size(3), o.kernel_size,
          o.kernel_size, stride,    stride,    o.padding, o.padding};
}

Variable average(const Variable& x, const PoolShape& s, bool flat) {
  Tensor y(x.backend(), {s.n, s.out_h(), s.out_w(), s.c}, x.dtype());
  y.backend().average_pool(s, x.value(), y);
  if (flat) y = y.reshape({s.n, s.c});
  return record<AveragePoolNode>(y, {&x}, {}, s);
}

}  // namespace

Variable max_pool2d(const Variable& x, const Pool2dOptions& options) {
  PoolShape s = pool_shape("max_pool2d", x, options);
  require(s.kh * s.kw <= 255, "max_pool2d: the window ", s.kh, "×", s.kw, " has more than 255 positions");
  Shape shape{s.n, s.out_h(), s.out_w(), s.c};
  Tensor y(x.backend(), shape, x.dtype()), argmax;
  if (needs_tape({&x})) argmax = Tensor(x.backend(), shape, DType::u8);
  y.backend().max_pool(s, x.value(), options.relu, y, argmax.defined() ? &argmax : nullptr);
  return record<MaxPoolNode>(y, {&x}, {argmax}, s, options.relu);
}

Variable average_pool2d(const Variable& x, const Pool2dOptions& options) {
  require(!options.relu, "average_pool2d: relu belongs to max_pool2d");
  return average(x, pool_shape("average_pool2d", x, options), false);
}

Variable global_average_pool(const Variable& x) {
  require(x.rank() == 4, "global_average_pool: input ", x.shape(), " must be [N,H,W,C]");
  std::int64_t h = x.size(1), w = x.size(2);
  require(h > 0 && w > 0, "global_average_pool: input ", x.shape(), " has no pixels to average");
  return average(x, {x.size(0), h, w, x.size(3), h, w, h, w, 0, 0}, true);
}

}  // namespace tandem
