// ReferenceBackend: every operation as the textbook writes it, in plain loops over float, bf16 or double. Slow,
// obviously right, and the oracle of the other backends: it shares no kernel and no element-wise functor with them.
//
// Numbers are read from T, sums are kept in double, and a result is rounded once, when it is stored.
// Host pointers throughout; one thread calls, the loops may use several. Results are bit-identical for equal threads.
#pragma once
#include <cstdint>

#include "core/backend.h"
#include "core/launch.h"

namespace tandem::reference {

// What parameters, their gradients and statistics are stored in, beside pictures of T: f32, and f64 beside f64.
template <class T>
using Parameter = Accumulator<T>;

// relu(NaN) is NaN: a comparison with NaN is false.
inline double relu(double v) { return v < 0 ? 0.0 : v; }

// y = v, or y += v.
template <class T>
void put(T& y, double v, bool add) {
  y = static_cast<T>(add ? static_cast<double>(y) + v : v);
}

// Temporary memory from the backend's allocator, given back at the end of the scope.
template <class E>
class Scratch {
 public:
  Scratch(Backend& backend, std::int64_t numel) : memory_(backend.memory()) {
    MemoryUse use(Use::scratch);
    data_ = static_cast<E*>(memory_.take(static_cast<std::size_t>(std::max<std::int64_t>(numel, 1)) * sizeof(E)));
  }
  ~Scratch() { memory_.give(data_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  E* data() const { return data_; }

 private:
  CachingAllocator& memory_;
  E* data_;
};

// Parts to cut `work` elementary steps into: one below the cost of a parallel region.
inline int parts_for(const Backend& backend, std::int64_t work) {
  return work >= parallel_grain ? backend.threads() : 1;
}

// body(part, begin, end) for `parts` fixed, nearly equal parts of [0, n), a thread each. The cut depends only on n and
// parts, however many threads OpenMP grants, so sums kept per part are reproducible.
template <class Body>
void for_parts(int parts, std::int64_t n, const Body& body) {
  parallel_ranges(parts, parts, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t p = first; p < last; p++)
      if (n * p / parts < n * (p + 1) / parts) body(p, n * p / parts, n * (p + 1) / parts);
  });
}

// sums[c] = Σ_r term(r, c). Threads share the columns, not the rows, so the result does not depend on their number.
template <class Term>
void sum_columns(const Backend& backend, std::int64_t rows, std::int64_t columns, double* sums, const Term& term) {
  for_parts(parts_for(backend, rows * columns), columns, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
    std::fill(sums + begin, sums + end, 0.0);
    for (std::int64_t r = 0; r < rows; r++)
      for (std::int64_t c = begin; c < end; c++) sums[c] += term(r, c);
  });
}

class ReferenceBackend : public Backend {
 public:
  explicit ReferenceBackend(int threads, std::unique_ptr<MemorySource> source = heap_memory());
  std::string description() const override;
  bool supports(DType dtype) const override;

  void upload(void* device, const void* host, std::size_t bytes) override;
  void download(void* host, const void* device, std::size_t bytes) override;
  void copy(void* to, const void* from, std::size_t bytes) override;
  void synchronize() override {}                                // a call returns when it is done
  void deterministic(bool) override { deterministic_ = true; }  // it always is
  void exact_convolution(bool) override {}                      // it always is

  // matrix.cpp
  void gemm(bool transpose_a, bool transpose_b, const Tensor& a, const Tensor& b, Tensor& c, bool add) override;
  void linear(const Tensor& x, const Tensor& w, const Tensor* bias, bool relu, Tensor& y) override;
  void linear_backward_data(const Tensor& dy, const Tensor& w, Tensor& dx, bool add) override;
  void linear_backward_weight(const Tensor& x, const Tensor& dy, Tensor& dw, bool add) override;

  // convolution.cpp
  void conv2d(const ConvShape& s, const Tensor& x, const Tensor& w, const Tensor* bias, bool relu, Tensor& y) override;
  void conv2d_backward_data(const ConvShape& s, const Tensor& dy, const Tensor& w, Tensor& dx, bool add) override;
  void conv2d_backward_filter(const ConvShape& s, const Tensor& x, const Tensor& dy, Tensor& dw, bool add) override;

  // pooling.cpp
  void max_pool(const PoolShape& s, const Tensor& x, bool relu, Tensor& y, Tensor* argmax) override;
  void max_pool_backward(const PoolShape& s, const Tensor& dy, const Tensor& argmax, Tensor& dx, bool add) override;
  void average_pool(const PoolShape& s, const Tensor& x, Tensor& y) override;
  void average_pool_backward(const PoolShape& s, const Tensor& dy, Tensor& dx, bool add) override;

  // batch_norm.cpp
  void batch_norm(const NormShape& s, const Tensor& x, const Tensor* residual, const Tensor& gamma, const Tensor& beta,
                  Tensor& running_mean, Tensor& running_variance, Tensor& y, Tensor& mean,
                  Tensor& inverse_std) override;
  void batch_norm_inference(const NormShape& s, const Tensor& x, const Tensor* residual, const Tensor& gamma,
                            const Tensor& beta, const Tensor& mean, const Tensor& variance, Tensor& y) override;
  void batch_norm_again(const NormShape& s, const Tensor& x, const Tensor* residual, const Tensor& gamma,
                        const Tensor& beta, const Tensor& mean, const Tensor& inverse_std, Tensor& y) override;
  void batch_norm_backward(const NormShape& s, const Tensor& x, const Tensor* y, const Tensor& dy, const Tensor& gamma,
                           const Tensor& beta, const Tensor& mean, const Tensor& inverse_std,
                           const NormGradients& out) override;

  // rows.cpp
  void sum_rows(const Tensor& dy, Tensor& db, bool add) override;
  void reduce(Reduction op, std::int64_t outer, std::int64_t middle, std::int64_t inner, const Tensor& x, Tensor& y,
              bool add) override;
  void squared_norm(const Tensor& x, Tensor& y, bool add) override;
  void cross_entropy(const Tensor& x, const Tensor& labels, double smoothing, Tensor& loss, Tensor& probabilities,
                     Tensor* correct) override;
  void cross_entropy_backward(const Tensor& probabilities, const Tensor& labels, double smoothing, const Tensor& dloss,
                              Tensor& dx, bool add) override;
};

}  // namespace tandem::reference
