// The public operations of a backend: the checks that all backends share, and the choice of the kernels' type.
#include "core/backend.h"

namespace tandem {
namespace {

struct Operand {
  const Tensor* tensor;  // null: absent
  std::int64_t numel;    // the required number of elements
};
using Operands = std::initializer_list<Operand>;

// The tensors of one operation. Pictures have the type of the first; parameters are f32, or f64 if the pictures are
// f64. The types of integers are checked by In and Out.
struct Checked {
  const char* op;
  Operands pictures, parameters = {}, integers = {};
  const Tensor& x() const { return *pictures.begin()->tensor; }

  void on(const Backend& backend) const {
    for (const auto& [operands, are_parameters] :
         {std::pair{pictures, false}, std::pair{parameters, true}, std::pair{integers, false}})
      for (const auto& [t, numel] : operands) {
        if (!t) continue;
        check_operand(op, backend, x(), *t, are_parameters);
        if (t->numel() != numel)
          fail(op, ": a tensor of the shape ", t->shape(), " is given where ", numel, " elements are expected");
      }
    for (const auto& [t, numel] : pictures)
      if (t && t->dtype() != x().dtype())
        fail(op, ": ", name_of(x().dtype()), " and ", name_of(t->dtype()), ": cast one of them");
  }
};

// Checks the tensors, and calls call(kernels) with the kernels of their type.
template <class AllKernels, class Call>
void run(const Backend& backend, const AllKernels& all, const Checked& tensors, const Call& call) {
  tensors.on(backend);
  const DType dtype = tensors.x().dtype();
  dispatch_among<float, bf16, f16, double>(dtype, tensors.op, [&]<class T> {
    const auto& kernels = std::get<std::unique_ptr<Kernels<T>>>(all);
    if (!kernels)
      fail(tensors.op, ": ", backend.name(), " backend: ",
           dtype == DType::f64 ? "only the reference backend has f64"
                               : name_of(dtype) + std::string(" is not supported (cast to f32 first)"));
    call(*kernels);
  });
}

struct Rows {  // a tensor as rows along its last axis
  std::int64_t length, count;
  explicit Rows(const Tensor& t) : length(t.size(-1)), count(length ? t.numel() / length : 0) {}
};

void check_window(const char* op, const PoolShape& s, bool with_argmax) {
  require(s.pad_h < s.kh && s.pad_w < s.kw, op, ": the padding ", s.pad_h, "×", s.pad_w,
          " must be smaller than the window ", s.kh, "×", s.kw);
  require(!with_argmax || s.kh * s.kw <= 255, op, ": a window of ", s.kh, "×", s.kw, " has more than 255 positions");
}

std::int64_t inputs(const PoolShape& s) { return s.n * s.h * s.w * s.c; }
std::int64_t outputs(const PoolShape& s) { return s.n * s.out_h() * s.out_w() * s.c; }

}  // namespace

void check_operand(const char* op, const Backend& backend, const Tensor& x, const Tensor& t, bool is_parameter) {
  if (&t.backend() != &backend)
    fail(op, ": the inputs ", x.shape(), " and ", t.shape(), " are on two backends (", backend.name(), " and ",
         t.backend().name(), "): move one with Tensor::to()");
  const DType wide = x.dtype() == DType::f64 ? DType::f64 : DType::f32;
  if (is_parameter && t.dtype() != wide)
    fail(op, ": beside an input of ", name_of(x.dtype()), " parameters are ", name_of(wide), ", ", t.shape(), " is ",
         name_of(t.dtype()), ": cast it");
}

// ---- matrices -------------------------------------------------------------------------------------------------------
void Backend::gemm(bool transpose_a, bool transpose_b, const Tensor& a, const Tensor& b, Tensor& c, bool add) {
  const std::int64_t batch = c.rank() == 3 ? c.size(0) : 1, m = c.size(-2), n = c.size(-1),
                     k = a.size(transpose_a ? -2 : -1);
  const Operands operands = {{&a, batch * m * k}, {&b, batch * k * n}, {&c, batch * m * n}};
  run(*this, kernels_, {"matmul", operands},
      [&](auto& kernels) { kernels.gemm(transpose_a, transpose_b, batch, m, n, k, a, b, c, add); });
}
void Backend::linear(const Tensor& x, const Tensor& w, const Tensor* bias, bool relu, Tensor& y) {
  const std::int64_t n = w.size(0), k = w.size(1), m = y.size(0);
  run(*this, kernels_, {"linear", {{&x, m * k}, {&y, m * n}}, {{&w, n * k}, {bias, n}}},
      [&](auto& kernels) { kernels.linear(m, n, k, x, w, bias, relu, y); });
}
void Backend::linear_backward_data(const Tensor& dy, const Tensor& w, Tensor& dx, bool add) {
  const std::int64_t n = w.size(0), k = w.size(1), m = dy.size(0);
  run(*this, kernels_, {"linear", {{&dy, m * n}, {&dx, m * k}}, {{&w, n * k}}},
      [&](auto& kernels) { kernels.linear_backward_data(m, n, k, dy, w, dx, add); });
}
void Backend::linear_backward_weight(const Tensor& x, const Tensor& dy, Tensor& dw, bool add) {
  const std::int64_t n = dw.size(0), k = dw.size(1), m = dy.size(0);
  run(*this, kernels_, {"linear", {{&x, m * k}, {&dy, m * n}}, {{&dw, n * k}}},
      [&](auto& kernels) { kernels.linear_backward_weight(m, n, k, x, dy, dw, add); });
}

// ---- convolution ----------------------------------------------------------------------------------------------------
void Backend::conv2d(const ConvShape& s, const Tensor& x, const Tensor& w, const Tensor* bias, bool relu, Tensor& y) {
  run(*this, kernels_, {"conv2d", {{&x, s.x_numel()}, {&y, s.y_numel()}}, {{&w, s.w_numel()}, {bias, s.c_out}}},
      [&](auto& kernels) { kernels.conv2d(s, x, w, bias, relu, y); });
}
void Backend::conv2d_backward_data(const ConvShape& s, const Tensor& dy, const Tensor& w, Tensor& dx, bool add) {
  run(*this, kernels_, {"conv2d", {{&dy, s.y_numel()}, {&dx, s.x_numel()}}, {{&w, s.w_numel()}}},
      [&](auto& kernels) { kernels.conv2d_backward_data(s, dy, w, dx, add); });
}
void Backend::conv2d_backward_filter(const ConvShape& s, const Tensor& x, const Tensor& dy, Tensor& dw, bool add) {
  run(*this, kernels_, {"conv2d", {{&x, s.x_numel()}, {&dy, s.y_numel()}}, {{&dw, s.w_numel()}}},
      [&](auto& kernels) { kernels.conv2d_backward_filter(s, x, dy, dw, add); });
}
void Backend::sum_rows(const Tensor& dy, Tensor& db, bool add) {
  const std::int64_t channels = db.numel(), rows = channels ? dy.numel() / channels : 0;
  if (channels == 0) return;
  run(*this, kernels_, {"sum_rows", {{&dy, rows * channels}}, {{&db, channels}}},
      [&](auto& kernels) { kernels.sum_rows(rows, channels, dy, db, add); });
}

// ---- pooling --------------------------------------------------------------------------------------------------------
void Backend::max_pool(const PoolShape& s, const Tensor& x, bool relu, Tensor& y, Tensor* argmax) {
  check_window("max_pool", s, argmax != nullptr);
  run(*this, kernels_, {"max_pool", {{&x, inputs(s)}, {&y, outputs(s)}}, {}, {{argmax, outputs(s)}}},
      [&](auto& kernels) { kernels.max_pool(s, x, relu, y, argmax); });
}
void Backend::max_pool_backward(const PoolShape& s, const Tensor& dy, const Tensor& argmax, Tensor& dx, bool add) {
  run(*this, kernels_, {"max_pool", {{&dy, outputs(s)}, {&dx, inputs(s)}}, {}, {{&argmax, outputs(s)}}},
      [&](auto& kernels) { kernels.max_pool_backward(s, dy, argmax, dx, add); });
}
void Backend::average_pool(const PoolShape& s, const Tensor& x, Tensor& y) {
  check_window("average_pool", s, false);
  run(*this, kernels_, {"average_pool", {{&x, inputs(s)}, {&y, outputs(s)}}},
      [&](auto& kernels) { kernels.average_pool(s, x, y); });
}
void Backend::average_pool_backward(const PoolShape& s, const Tensor& dy, Tensor& dx, bool add) {
  check_window("average_pool", s, false);
  run(*this, kernels_, {"average_pool", {{&dy, outputs(s)}, {&dx, inputs(s)}}},
      [&](auto& kernels) { kernels.average_pool_backward(s, dy, dx, add); });
}

// ---- batch normalisation --------------------------------------------------------------------------------------------
void Backend::batch_norm(const NormShape& s, const Tensor& x, const Tensor* residual, const Tensor& gamma,
                         const Tensor& beta, Tensor& running_mean, Tensor& running_variance, Tensor& y, Tensor& mean,
                         Tensor& inverse_std) {
  const std::int64_t n = s.rows * s.channels, c = s.channels;
  const Operands parameters = {{&gamma, c}, {&beta, c},       {&running_mean, c}, {&running_variance, c},
                               {&mean, c},  {&inverse_std, c}};
  run(*this, kernels_, {"batch_norm", {{&x, n}, {residual, n}, {&y, n}}, parameters}, [&](auto& kernels) {
    kernels.batch_norm(s, x, residual, gamma, beta, running_mean, running_variance, y, mean, inverse_std);
  });
}
void Backend::normalise(const NormShape& s, const Tensor& x, const Tensor* residual, const Tensor& gamma,
                        const Tensor& beta, const Tensor& mean, const Tensor& spread, bool is_variance, Tensor& y) {
  const std::int64_t n = s.rows * s.channels, c = s.channels;
  const Operands parameters = {{&gamma, c}, {&beta, c}, {&mean, c}, {&spread, c}};
  run(*this, kernels_, {"batch_norm", {{&x, n}, {residual, n}, {&y, n}}, parameters},
      [&](auto& kernels) { kernels.normalise(s, x, residual, gamma, beta, mean, spread, is_variance, y); });
}
void Backend::batch_norm_backward(const NormShape& s, const Tensor& x, const Tensor* y, const Tensor& dy,
                                  const Tensor& gamma, const Tensor& beta, const Tensor& mean,
                                  const Tensor& inverse_std, const NormGradients& out) {
  const std::int64_t n = s.rows * s.channels, c = s.channels;
  const Operands pictures = {{&x, n}, {y, n}, {&dy, n}, {out.dx, n}, {out.dresidual, n}},
                 parameters = {{&gamma, c}, {&beta, c}, {&mean, c}, {&inverse_std, c}, {out.dgamma, c}, {out.dbeta, c}};
  run(*this, kernels_, {"batch_norm", pictures, parameters}, [&]<class T>(Kernels<T>& kernels) {
    using P = Accumulator<T>;
    const NormOutputs<T, P> to{Out<T>(out.dx), Out<T>(out.dresidual), Out<P>(out.dgamma), Out<P>(out.dbeta),
                               out.add_dx,     out.add_dresidual,     out.add_dgamma,     out.add_dbeta};
    kernels.batch_norm_backward(s, x, y, dy, gamma, beta, mean, inverse_std, to);
  });
}

// ---- rows and reductions --------------------------------------------------------------------------------------------
void Backend::reduce(Reduction op, std::int64_t outer, std::int64_t middle, std::int64_t inner, const Tensor& x,
                     Tensor& y, bool add) {
  run(*this, kernels_, {"reduce", {{&x, outer * middle * inner}, {&y, outer * inner}}},
      [&](auto& kernels) { kernels.reduce(op, outer, middle, inner, x, y, add); });
}
void Backend::squared_norm(const Tensor& x, Tensor& y, bool add) {
  run(*this, kernels_, {"squared_norm", {{&x, x.numel()}}, {{&y, 1}}},
      [&](auto& kernels) { kernels.squared_norm(x.numel(), x, y, add); });
}
void Backend::cross_entropy(const Tensor& x, const Tensor& labels, double smoothing, Tensor& loss,
                            Tensor& probabilities, Tensor* correct) {
  const Rows r(x);
  if (!on_device())  // a device cannot throw: there such a label makes the loss NaN
    for (std::int64_t row = 0; row < r.count; row++) {
      const std::int32_t label = labels.data<std::int32_t>()[row];
      require(label >= 0 && label < r.length, "cross_entropy: row ", row, " has the label ", label, ", but there are ",
              r.length, " classes: labels are 0 to ", r.length - 1);
    }
  const Operands parameters = {{&loss, 1}, {&probabilities, x.numel()}}, integers = {{&labels, r.count}, {correct, 1}};
  run(*this, kernels_, {"cross_entropy", {{&x, x.numel()}}, parameters, integers}, [&](auto& kernels) {
    kernels.cross_entropy(r.count, r.length, x, labels, smoothing, loss, probabilities, correct);
  });
}
void Backend::cross_entropy_backward(const Tensor& probabilities, const Tensor& labels, double smoothing,
                                     const Tensor& dloss, Tensor& dx, bool add) {
  const Rows r(dx);
  const Operands parameters = {{&probabilities, dx.numel()}, {&dloss, 1}};
  run(*this, kernels_, {"cross_entropy", {{&dx, dx.numel()}}, parameters, {{&labels, r.count}}}, [&](auto& kernels) {
    kernels.cross_entropy_backward(r.count, r.length, probabilities, labels, smoothing, dloss, dx, add);
  });
}

}  // namespace tandem
