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

Tensor max_pooled(const PoolShape& s, const Tensor& x, bool relu, Tensor* argmax) {
  Tensor y(x.backend(), {s.n, s.out_h(), s.out_w(), s.c}, x.dtype());
  y.backend().max_pool(s, x, relu, y, argmax);
  return y;
}

Tensor averaged(const PoolShape& s, const Tensor& x) {
  Tensor y(x.backend(), {s.n, s.out_h(), s.out_w(), s.c}, x.dtype());
  y.backend().average_pool(s, x, y);
  return y;
}

struct MaxPoolNode : Node {
  static constexpr auto name = "max_pool2d";
  PoolShape s;
  bool relu;
  MaxPoolNode(const PoolShape& shape, bool r) : Node(name), s(shape), relu(r) {}
  Attributes attributes() const override { return describe(s, relu); }
  Recomputation recompute(Operands in) const override {
    return {{in[0]->value()},
            [s = s, relu = relu](std::span<const Tensor> t) { return max_pooled(s, t[0], relu, nullptr); }};
  }
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
  Recomputation recompute(Operands in) const override {
    return {{in[0]->value()}, [s = s, y = shape](std::span<const Tensor> t) { return averaged(s, t[0]).reshape(y); }};
  }
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

}  // namespace

Variable max_pool2d(const Variable& x, const Pool2dOptions& options) {
  PoolShape s = pool_shape("max_pool2d", x, options);
  require(s.kh * s.kw <= 255, "max_pool2d: the window ", s.kh, "×", s.kw, " has more than 255 positions");
  Tensor argmax;
  if (needs_tape({&x})) argmax = Tensor(x.backend(), {s.n, s.out_h(), s.out_w(), s.c}, DType::u8);
  const Tensor y = max_pooled(s, x.value(), options.relu, argmax.defined() ? &argmax : nullptr);
  return record<MaxPoolNode>(y, {&x}, {argmax}, s, options.relu);
}

Variable average_pool2d(const Variable& x, const Pool2dOptions& options) {
  require(!options.relu, "average_pool2d: relu belongs to max_pool2d");
  const PoolShape s = pool_shape("average_pool2d", x, options);
  return record<AveragePoolNode>(averaged(s, x.value()), {&x}, {}, s);
}

Variable global_average_pool(const Variable& x) {
  require(x.rank() == 4, "global_average_pool: input ", x.shape(), " must be [N,H,W,C]");
  std::int64_t h = x.size(1), w = x.size(2);
  require(h > 0 && w > 0, "global_average_pool: input ", x.shape(), " has no pixels to average");
  const PoolShape s{x.size(0), h, w, x.size(3), h, w, h, w, 0, 0};
  return record<AveragePoolNode>(averaged(s, x.value()).reshape({s.n, s.c}), {&x}, {}, s);
}

}  // namespace tandem
