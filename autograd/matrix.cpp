// Matrix products. With y = a·b, the gradients are again products: da = dy·bᵀ, db = aᵀ·dy.
#include "autograd/ops.h"
#include "core/backend.h"
#include "core/elementwise.h"

namespace tandem {
namespace {

// c = op(a)·op(b), or c += …. If an operand is empty, the result is zero and no backend is called.
void product(bool transpose_a, bool transpose_b, const Tensor& a, const Tensor& b, Tensor& c, bool add) {
  if (a.numel() && b.numel())
    c.backend().gemm(transpose_a, transpose_b, a, b, c, add);
  else if (!add)
    c.fill(0);
}

struct MatmulNode : Node {
  static constexpr auto name = "matmul";
  MatmulNode() : Node(name) {}
  double flops() const override { return 2.0 * double(saved[0].tensor.numel()) * double(saved[1].tensor.size(-1)); }
  void backward(Tensor dy, std::span<GradientSlot> slots) override {
    const Tensor &a = kept(0), &b = kept(1);
    slots[0].fill(dy.backend(), a.shape(), a.dtype(), false,
                  [&](Tensor& da, bool add) { product(false, true, dy, b, da, add); });
    slots[1].fill(dy.backend(), b.shape(), b.dtype(), false,
                  [&](Tensor& db, bool add) { product(true, false, a, dy, db, add); });
  }
};

struct LinearNode : Node {
  static constexpr auto name = "linear";
  bool relu;
  explicit LinearNode(bool r) : Node(name), relu(r) {}
  double flops() const override { return 2.0 * double(saved[0].tensor.numel()) * double(saved[1].tensor.size(0)); }
  Attributes attributes() const override { return {{"relu", {double(relu)}}}; }
  void backward(Tensor dy, std::span<GradientSlot> slots) override {
    const Tensor &x = kept(0), &w = kept(1);
    Backend& backend = dy.backend();
    if (relu) dy = mask_positive(kept(2), std::move(dy));
    slots[2].fill(backend, {w.size(0)}, w.dtype(), false, [&](Tensor& db, bool add) { backend.sum_rows(dy, db, add); });
    slots[1].fill(backend, w.shape(), w.dtype(), x.numel() == 0 || dy.numel() == 0,
                  [&](Tensor& dw, bool add) { backend.linear_backward_weight(x, dy, dw, add); });
    slots[0].fill(backend, {dy.size(0), w.size(1)}, dy.dtype(), w.numel() == 0 || dy.numel() == 0,
                  [&](Tensor& dx, bool add) { backend.linear_backward_data(dy, w, dx, add); });
  }
};

// Broadcasts x[…, rows, columns] to [batch…, rows, columns].
Variable in_batches(const Variable& x, const Shape& batch) {
  Shape full = batch;
  for (int axis : {-2, -1}) full.append(x.size(axis));
  return x.shape() == full ? x : x + Variable(Tensor::zeros(x.backend(), full, x.dtype()));
}

Variable multiply(const Variable& a, const Variable& b) {  // two matrices, or two equally long batches of them
  Shape shape = a.shape();
  shape[-1] = b.size(-1);
  Tensor y(a.backend(), shape, a.dtype());
  product(false, false, a.value(), b.value(), y, false);
  return record<MatmulNode>(y, {&a, &b}, {a.value(), b.value()});
}

}  // namespace

Variable matmul(const Variable& a, const Variable& b) {
  require(a.rank() >= 2 && b.rank() >= 2, "matmul: ", a.shape(), " · ", b.shape(), ": matrices, or batches of them");
  const std::int64_t m = a.size(-2), k = a.size(-1), n = b.size(-1);
  require(k == b.size(-2), "matmul: ", a.shape(), " · ", b.shape(), ": inner sizes ", k, " and ", b.size(-2),
          " differ");
  if (a.rank() == 2 && b.rank() == 2) return multiply(a, b);
  const auto batch_of = [](const Shape& s) { return Shape(std::span(s.begin(), std::size_t(s.rank() - 2))); };
  const Shape batch = broadcast_shape("matmul", batch_of(a.shape()), batch_of(b.shape()));
  Shape shape = batch;
  for (std::int64_t size : {m, n}) shape.append(size);
  if (b.rank() == 2)  // one matrix for all rows of a
    return reshape(multiply(reshape(a, Shape{batch.numel() * m, k}), b), shape);
  const Variable left = in_batches(a, batch), right = in_batches(b, batch);
  if (batch.rank() == 1) return multiply(left, right);
  return reshape(multiply(reshape(left, Shape{batch.numel(), m, k}), reshape(right, Shape{batch.numel(), k, n})),
                 shape);
}

Variable linear(const Variable& x, const Variable& w, const Variable& bias, bool relu) {
  require(x.rank() == 2 && w.rank() == 2, "linear: input ", x.shape(), " and weight ", w.shape(),
          " must be matrices (flatten pictures first)");
  require(x.size(1) == w.size(1), "linear: input ", x.shape(), " has ", x.size(1), " features, weight ", w.shape(),
          " expects ", w.size(1));
  require(!bias.defined() || bias.value().numel() == w.size(0), "linear: bias ",
          bias.defined() ? bias.shape() : Shape(), " for ", w.size(0), " outputs");
  const Tensor* b = bias.defined() ? &bias.value() : nullptr;
  Tensor y(x.backend(), {x.size(0), w.size(0)}, x.dtype());
  if (x.value().numel() && y.numel()) {
    y.backend().linear(x.value(), w.value(), b, relu, y);
  } else if (y.numel()) {  // without features, the result is the bias
    NoGrad off;
    y.fill(0);
    if (bias.defined()) y = add(Variable(y), cast(reshape(bias, Shape{w.size(0)}), y.dtype())).value();
    if (relu) y = tandem::relu(Variable(y)).value();
  }
  return record<LinearNode>(y, {&x, &w, &bias}, {x.value(), w.value(), relu ? y : Tensor()}, relu);
}

}  // namespace tandem
