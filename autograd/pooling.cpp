// Pooling. Max pooling remembers, in one byte per output, which element of the window won; its gradient goes there and nowhere
// else.
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
  void backward(Tensor dy, std::span<Sink> sinks) override {
    const Tensor& winner = kept(0);
    auto [dx, add] = sinks[0].place(dy.backend(), {s.n, s.h, s.w, s.c}, dy.dtype());
    dy.backend().max_pool_backward(s, dy, winner, *dx, add);
  }
};

struct AveragePoolNode : Node {
  static constexpr auto name = "average_pool2d";
  PoolShape s;
  explicit AveragePoolNode(const PoolShape& shape) : Node(name), s(shape) {}
  Attributes attributes() const override { return describe(s, false); }
  void backward(Tensor dy, std::span<Sink> sinks) override {
    auto [dx, add] = sinks[0].place(dy.backend(), {s.n, s.h, s.w, s.c}, dy.dtype());
    dy.backend().average_pool_backward(s, dy, *dx, add);
  }
};

PoolShape pool_shape(const char* op, const Variable& x, const Pool2dOptions& o) {
  require(x.rank() == 4, op, ": input ", x.shape(), " must be [N,H,W,C]");
  std::int64_t stride = o.stride ? o.stride : o.window;
  require(o.window >= 1 && stride >= 1 && o.padding >= 0, op, ": window ", o.window, ", stride ", stride, ", padding ",
          o.padding, " are out of range");
  require(2 * o.padding <= o.window, op, ": padding ", o.padding, " is more than half of the window ", o.window);
  require(x.extent(1) + 2 * o.padding >= o.window && x.extent(2) + 2 * o.padding >= o.window, op, ": a ", o.window, "×",
          o.window, " window does not fit input ", x.shape());
  return {x.extent(0), x.extent(1), x.extent(2), x.extent(3), o.window, o.window, stride, stride, o.padding, o.padding};
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
  Tensor y(x.backend(), shape, x.dtype()), winner;
  if (needs_tape({&x})) winner = Tensor(x.backend(), shape, DType::u8);
  y.backend().max_pool(s, x.value(), options.relu, y, winner.defined() ? &winner : nullptr);
  return record<MaxPoolNode>(y, {&x}, {winner}, s, options.relu);
}

Variable average_pool2d(const Variable& x, const Pool2dOptions& options) {
  require(!options.relu, "average_pool2d: relu belongs to max_pool2d");
  return average(x, pool_shape("average_pool2d", x, options), false);
}

Variable global_average_pool(const Variable& x) {
  require(x.rank() == 4, "global_average_pool: input ", x.shape(), " must be [N,H,W,C]");
  std::int64_t h = x.extent(1), w = x.extent(2);
  require(h > 0 && w > 0, "global_average_pool: input ", x.shape(), " has no pixels to average");
  return average(x, {x.extent(0), h, w, x.extent(3), h, w, h, w, 0, 0}, true);
}

}  // namespace tandem
