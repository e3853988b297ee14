// Matrix products. With y = a·b, the gradients are again products: da = dy·bᵀ, db = aᵀ·dy.
#include "autograd/ops.h"
#include "core/backend.h"
#include "core/elementwise.h"

namespace tandem {
namespace {

// c = op(a)·op(b), or c += …; where one of them is empty the sum is of nothing, which no backend is asked for.
void product(bool transpose_a, bool transpose_b, const Tensor& a, const Tensor& b, Tensor& c, bool add) {
  if (a.elements() && b.elements()) c.backend().gemm(transpose_a, transpose_b, a, b, c, add);
  else if (!add) c.fill(0);
}

struct MatmulNode : Node {
  static constexpr auto name = "matmul";
  MatmulNode() : Node(name) {}
  double flops() const override {
    return 2.0 * double(saved[0].tensor.elements()) * double(saved[1].tensor.extent(-1));
  }
  void backward(Tensor dy, std::span<Sink> sinks) override {
    const Tensor &a = kept(0), &b = kept(1);
    if (sinks[0].wanted()) {
      auto [da, add] = sinks[0].place(dy.backend(), a.shape(), a.dtype());
      product(false, true, dy, b, *da, add);
    }
    if (sinks[1].wanted()) {
      auto [db, add] = sinks[1].place(dy.backend(), b.shape(), b.dtype());
      product(true, false, a, dy, *db, add);
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
      if (x.elements() && dy.elements()) backend.linear_backward_weight(x, dy, *dw, add);
      else if (!add) dw->fill(0);
    }
    if (sinks[0].wanted()) {
      Shape in{dy.extent(0), w.extent(1)};
      auto [dx, add] = sinks[0].place(backend, in, dy.dtype());
      if (w.elements() && dy.elements()) backend.linear_backward_data(dy, w, *dx, add);
      else if (!add) dx->fill(0);
    }
  }
};

// x with the batch axes `batch` before its matrices: repeated where they are more than x has.
Variable in_batches(const Variable& x, const Shape& batch) {
  Shape full = batch;
  full.append(x.extent(-2)), full.append(x.extent(-1));
  return x.shape() == full ? x : x + Variable(Tensor::zeros(x.backend(), full, x.dtype()));
}

Variable multiply(const Variable& a, const Variable& b) {  // two matrices, or two equally long batches of them
  Shape shape = a.shape();
  shape[-1] = b.extent(-1);
  Tensor y(a.backend(), shape, a.dtype());
  product(false, false, a.value(), b.value(), y, false);
  return record<MatmulNode>(y, {&a, &b}, {a.value(), b.value()});
}

}  // namespace

Variable matmul(const Variable& a, const Variable& b) {
  require(a.dtype() == b.dtype(), "matmul: ", name_of(a.dtype()), " and ", name_of(b.dtype()), ": cast one of them");
  check_inputs("matmul", a.value(), {}, {&b.value()});
  require(a.rank() >= 2 && b.rank() >= 2, "matmul: ", a.shape(), " · ", b.shape(), ": matrices, or batches of them");
  const std::int64_t m = a.extent(-2), k = a.extent(-1), n = b.extent(-1);
  require(k == b.extent(-2), "matmul: ", a.shape(), " · ", b.shape(), ": inner extents ", k, " and ", b.extent(-2), " differ");
  if (a.rank() == 2 && b.rank() == 2) return multiply(a, b);
  const auto batch_of = [](const Shape& s) { return Shape(std::span(s.begin(), std::size_t(s.rank() - 2))); };
  const Shape batch = broadcast_shape("matmul", batch_of(a.shape()), batch_of(b.shape()));
  Shape shape = batch;
  shape.append(m), shape.append(n);
  if (b.rank() == 2)  // one matrix for all rows of a
    return reshape(multiply(reshape(a, Shape{batch.elements() * m, k}), b), shape);
  const Variable left = in_batches(a, batch), right = in_batches(b, batch);
  if (batch.rank() == 1) return multiply(left, right);
  return reshape(multiply(reshape(left, Shape{batch.elements(), m, k}), reshape(right, Shape{batch.elements(), k, n})), shape);
}

Variable linear(const Variable& x, const Variable& w, const Variable& bias, bool relu) {
  require(x.rank() == 2 && w.rank() == 2, "linear: input ", x.shape(), " and weight ", w.shape(),
          " must be matrices (flatten pictures first)");
  require(x.extent(1) == w.extent(1), "linear: input ", x.shape(), " has ", x.extent(1), " features, weight ",
          w.shape(), " expects ", w.extent(1));
  require(!bias.defined() || bias.value().elements() == w.extent(0), "linear: bias ",
          bias.defined() ? bias.shape() : Shape(), " for ", w.extent(0), " outputs");
  const Tensor* b = bias.defined() ? &bias.value() : nullptr;
  check_inputs("linear", x.value(), {&w.value(), b});
  Tensor y(x.backend(), {x.extent(0), w.extent(0)}, x.dtype());
  if (x.value().elements() && y.elements()) {
    y.backend().linear(x.value(), w.value(), b, relu, y);
  } else if (y.elements()) {  // no features: what is left is the bias
    NoGrad off;
    y.fill(0);
    if (bias.defined()) y = add(Variable(y), cast(reshape(bias, Shape{w.extent(0)}), y.dtype())).value();
    if (relu) y = tandem::relu(Variable(y)).value();
  }
  return record<LinearNode>(y, {&x, &w, &bias}, {x.value(), w.value(), relu ? y : Tensor()}, relu);
}

}  // namespace tandem
