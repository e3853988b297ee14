// Matrix products. With y = a·b, the gradients are again products: da = dy·bᵀ, db = aᵀ·dy.
#include "autograd/ops.h"
#include "core/backend.h"
#include "core/elementwise.h"

namespace tandem {
namespace {

struct MatmulNode : Node {
  static constexpr auto name = "matmul";
  MatmulNode() : Node(name) {}
  double flops() const override {
    return 2.0 * double(saved[0].tensor.elements()) * double(saved[1].tensor.extent(-1));
  }
  void backward(Tensor dy, std::span<Sink> sinks) override {
    const Tensor &a = kept(0), &b = kept(1);
    Backend& backend = dy.backend();
    if (sinks[0].wanted()) {
      auto [da, add] = sinks[0].place(backend, a.shape(), a.dtype());
      backend.gemm(false, true, dy, b, *da, add);
    }
    if (sinks[1].wanted()) {
      auto [db, add] = sinks[1].place(backend, b.shape(), b.dtype());
      backend.gemm(true, false, a, dy, *db, add);
    }
  }
};

struct LinearNode : Node {
  static constexpr auto name = "linear";
  bool relu;
  explicit LinearNode(bool r) : Node(name), relu(r) {}
  double flops() const override { return 2.0 * double(saved[0].tensor.elements()) * double(saved[1].tensor.extent(0)); }
  Attributes attributes() const override { return {{"relu", {double(relu)}}}; }
  void backward(Tensor dy, std::span<Sink> sinks) override {
    const Tensor &x = kept(0), &w = kept(1);
    Backend& backend = dy.backend();
    if (relu) dy = mask_positive(kept(2), std::move(dy));
    if (sinks[2].wanted()) {
      auto [db, add] = sinks[2].place(backend, {w.extent(0)}, w.dtype());
      backend.sum_rows(dy, *db, add);
    }
    if (sinks[1].wanted()) {
      auto [dw, add] = sinks[1].place(backend, w.shape(), w.dtype());
      backend.linear_backward_weight(x, dy, *dw, add);
    }
    if (sinks[0].wanted()) {
      Shape in{dy.extent(0), w.extent(1)};
      auto [dx, add] = sinks[0].place(backend, in, dy.dtype());
      backend.linear_backward_data(dy, w, *dx, add);
    }
  }
};

}  // namespace

Variable matmul(const Variable& a, const Variable& b) {
  require(a.dtype() == b.dtype(), "matmul: ", name_of(a.dtype()), " and ", name_of(b.dtype()), ": cast one of them");
  bool batched = a.rank() == 3;
  require((a.rank() == 2 && b.rank() == 2) || (batched && b.rank() == 3 && a.extent(0) == b.extent(0)),
          "matmul: ", a.shape(), " · ", b.shape(), ": two matrices, or two equally long batches of them");
  require(a.extent(-1) == b.extent(-2), "matmul: ", a.shape(), " · ", b.shape(), ": inner extents ", a.extent(-1),
          " and ", b.extent(-2), " differ");
  Shape shape = batched ? Shape{a.extent(0), a.extent(1), b.extent(2)} : Shape{a.extent(0), b.extent(1)};
  Tensor y(a.backend(), shape, a.dtype());
  y.backend().gemm(false, false, a.value(), b.value(), y, false);
  return record<MatmulNode>(y, {&a, &b}, {a.value(), b.value()});
}

Variable linear(const Variable& x, const Variable& w, const Variable& bias, bool relu) {
  require(x.rank() == 2 && w.rank() == 2, "linear: input ", x.shape(), " and weight ", w.shape(),
          " must be matrices (flatten pictures first)");
  require(x.extent(1) == w.extent(1), "linear: input ", x.shape(), " has ", x.extent(1), " features, weight ",
          w.shape(), " expects ", w.extent(1));
  require(!bias.defined() || bias.value().elements() == w.extent(0), "linear: bias ",
          bias.defined() ? bias.shape() : Shape(), " for ", w.extent(0), " outputs");
  Tensor y(x.backend(), {x.extent(0), w.extent(0)}, x.dtype());
  y.backend().linear(x.value(), w.value(), bias.defined() ? &bias.value() : nullptr, relu, y);
  return record<LinearNode>(y, {&x, &w, &bias}, {x.value(), w.value(), relu ? y : Tensor()}, relu);
}

}  // namespace tandem
