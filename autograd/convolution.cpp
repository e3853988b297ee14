// Two-dimensional convolution. y[n,p,q,o] = Σ x[n, p·s + i·d − pad, q·s + j·d − pad, c]·w[o,i,j,c] + bias[o]. The
// backend computes both gradients, which are convolutions too.
#include "autograd/ops.h"
#include "core/backend.h"
#include "core/elementwise.h"

namespace tandem {
namespace {

struct Conv2dNode : Node {
  static constexpr auto name = "conv2d";
  ConvShape s;
  Conv2dOptions options;
  Conv2dNode(const ConvShape& shape, const Conv2dOptions& o) : Node(name), s(shape), options(o) {}
  double flops() const override { return s.flops(); }
  Attributes attributes() const override {
    return {{"window", {double(s.kh), double(s.kw)}},
            {"stride", {double(s.stride_h), double(s.stride_w)}},
            {"padding", {double(s.pad_h), double(s.pad_w)}},
            {"dilation", {double(s.dilation_h), double(s.dilation_w)}},
            {"groups", {double(s.groups)}},
            {"relu", {double(options.relu)}}};
  }
  // The weights are passed as a view that is not a parameter, because a backend keeps a prepared form of a parameter
  // from its second use on.
  Recomputation recompute(Operands in) const override {
    return {{in[0]->value(), in[1]->value(), in[2]->defined() ? in[2]->value() : Tensor()},
            [o = options](std::span<const Tensor> s) {
              auto* weights = const_cast<std::byte*>(static_cast<const std::byte*>(s[1].raw()));
              const Tensor w =
                  Tensor::wrap(s[1].backend(), weights, s[1].shape(), s[1].dtype(), std::make_shared<Tensor>(s[1]));
              return conv2d(Variable(s[0]), Variable(w), Variable(s[2]), o).value();
            }};
  }
  void backward(Tensor dy, std::span<GradientSlot> slots) override {
    const Tensor &x = kept(0), &w = kept(1);
    Backend& backend = dy.backend();
    if (options.relu) dy = mask_positive(kept(2), std::move(dy));
    slots[2].fill(backend, {s.c_out}, w.dtype(), false, [&](Tensor& db, bool add) { backend.sum_rows(dy, db, add); });
    slots[1].fill(backend, w.shape(), w.dtype(), s.n == 0,
                  [&](Tensor& dw, bool add) { backend.conv2d_backward_filter(s, x, dy, dw, add); });
    slots[0].fill(backend, {s.n, s.h, s.w, s.c_in}, dy.dtype(), s.n == 0,
                  [&](Tensor& dx, bool add) { backend.conv2d_backward_data(s, dy, w, dx, add); });
  }
};

}  // namespace

Variable conv2d(const Variable& x, const Variable& w, const Variable& bias, const Conv2dOptions& o) {
  require(x.rank() == 4 && w.rank() == 4, "conv2d: input ", x.shape(), " must be [N,H,W,C], weight ", w.shape(),
          " [O,H,W,I]");
  require(o.stride >= 1 && o.dilation >= 1 && o.groups >= 1 && o.padding >= 0 && o.padding_w >= -1, "conv2d: stride ",
          o.stride, ", dilation ", o.dilation, ", groups ", o.groups, ", padding ", o.padding, ", padding_w ",
          o.padding_w, " are out of range");
  ConvShape s{.n = x.size(0),
              .h = x.size(1),
              .w = x.size(2),
              .c_in = x.size(3),
              .c_out = w.size(0),
              .kh = w.size(1),
              .kw = w.size(2),
              .stride_h = o.stride,
              .stride_w = o.stride,
              .pad_h = o.padding,
              .pad_w = o.padding_w < 0 ? o.padding : o.padding_w,
              .dilation_h = o.dilation,
              .dilation_w = o.dilation,
              .groups = o.groups};
  require(s.c_in == w.size(3) * s.groups, "conv2d: input ", x.shape(), " has ", s.c_in, " channels, weight ", w.shape(),
          " in ", s.groups, " groups expects ", w.size(3) * s.groups);
  require(s.c_out % s.groups == 0, "conv2d: ", s.c_out, " output channels do not divide into ", s.groups, " groups");
  require(s.h + 2 * s.pad_h > s.dilation_h * (s.kh - 1) && s.w + 2 * s.pad_w > s.dilation_w * (s.kw - 1), "conv2d: a ",
          s.kh, "×", s.kw, " window does not fit input ", x.shape(), " with padding ", s.pad_h, ",", s.pad_w);
  require(!bias.defined() || bias.value().numel() == s.c_out, "conv2d: bias ", bias.defined() ? bias.shape() : Shape(),
          " for ", s.c_out, " output channels");
  Tensor y(x.backend(), {s.n, s.out_h(), s.out_w(), s.c_out}, x.dtype());
  const Tensor* b = bias.defined() ? &bias.value() : nullptr;
  if (s.n > 0)  // backends are not called for an empty batch
    y.backend().conv2d(s, x.value(), w.value(), b, o.relu, y);
  return record<Conv2dNode>(y, {&x, &w, &bias}, {x.value(), w.value(), o.relu ? y : Tensor()}, s, o);
}

}  // namespace tandem
