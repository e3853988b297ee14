// ReferenceBackend: every operation as the textbook writes it, in plain loops over float, bf16 or double. Slow,
// obviously right, and the oracle of the other backends: it shares no kernel and no element-wise functor with them.
//
// Numbers are read from T, sums are kept in double, and a result is rounded once, when it is stored.
// Host pointers throughout; one thread calls, the loops may use several. Results are bit-identical for equal threads.
#pragma once
#include <cstdint>
#include <vector>

#include "core/backend.h"
#include "core/launch.h"

namespace tandem::reference {

// relu(NaN) is NaN: a comparison with NaN is false.
inline double relu(double v) { return v < 0 ? 0.0 : v; }

// y = v, or y += v.
template <class T>
void put(T& y, double v, bool add) {
  y = static_cast<T>(add ? static_cast<double>(y) + v : v);
}

// Calls body(i) for every i in [0, n), shared among threads where the steps are enough to pay for it.
template <class Body>
void for_each(int threads, std::int64_t n, std::int64_t steps, const Body& body) {
  parallel_ranges(steps >= parallel_grain ? threads : 1, n, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; i++) body(i);
  });
}

// sums[c] = Σ_r term(r, c). Threads share the columns, not the rows, so the result does not depend on their number.
template <class Term>
std::vector<double> sum_columns(int threads, std::int64_t rows, std::int64_t columns, const Term& term) {
  std::vector<double> sums(static_cast<std::size_t>(columns));
  parallel_ranges(rows * columns >= parallel_grain ? threads : 1, columns, 1,
                  [&](std::int64_t begin, std::int64_t end) {
                    for (std::int64_t r = 0; r < rows; r++)
                      for (std::int64_t c = begin; c < end; c++) sums[static_cast<std::size_t>(c)] += term(r, c);
                  });
  return sums;
}

template <class T>
class ReferenceKernels : public Kernels<T> {
 public:
  using P = Accumulator<T>;
  ReferenceKernels(int threads, CachingAllocator& memory) : threads_(threads), memory_(memory) {}

  // matrix.cpp
  void gemm(bool transpose_a, bool transpose_b, std::int64_t batch, std::int64_t m, std::int64_t n, std::int64_t k,
            In<T> a, In<T> b, Out<T> c, bool add) override;
  void linear(std::int64_t m, std::int64_t n, std::int64_t k, In<T> x, In<P> w, In<P> bias, bool relu,
              Out<T> y) override;
  void linear_backward_data(std::int64_t m, std::int64_t n, std::int64_t k, In<T> dy, In<P> w, Out<T> dx,
                            bool add) override;
  void linear_backward_weight(std::int64_t m, std::int64_t n, std::int64_t k, In<T> x, In<T> dy, Out<P> dw,
                              bool add) override;
  // convolution.cpp
  void conv2d(const ConvShape& s, In<T> x, In<P> w, In<P> bias, bool relu, Out<T> y) override;
  void conv2d_backward_data(const ConvShape& s, In<T> dy, In<P> w, Out<T> dx, bool add) override;
  void conv2d_backward_filter(const ConvShape& s, In<T> x, In<T> dy, Out<P> dw, bool add) override;
  // pooling.cpp
  void max_pool(const PoolShape& s, In<T> x, bool relu, Out<T> y, Out<std::uint8_t> argmax) override;
  void max_pool_backward(const PoolShape& s, In<T> dy, In<std::uint8_t> argmax, Out<T> dx, bool add) override;
  void average_pool(const PoolShape& s, In<T> x, Out<T> y) override;
  void average_pool_backward(const PoolShape& s, In<T> dy, Out<T> dx, bool add) override;
  // batch_norm.cpp
  void batch_norm(const NormShape& s, In<T> x, In<T> residual, In<P> gamma, In<P> beta, Out<P> running_mean,
                  Out<P> running_variance, Out<T> y, Out<P> mean, Out<P> inverse_std) override;
  void normalise(const NormShape& s, In<T> x, In<T> residual, In<P> gamma, In<P> beta, In<P> mean, In<P> spread,
                 bool is_variance, Out<T> y) override;
  void batch_norm_backward(const NormShape& s, In<T> x, In<T> y, In<T> dy, In<P> gamma, In<P> beta, In<P> mean,
                           In<P> inverse_std, const NormOutputs<T, P>& out) override;
  // rows.cpp
  void sum_rows(std::int64_t rows, std::int64_t channels, In<T> dy, Out<P> db, bool add) override;
  void reduce(Reduction op, std::int64_t outer, std::int64_t middle, std::int64_t inner, In<T> x, Out<T> y,
              bool add) override;
  void squared_norm(std::int64_t n, In<T> x, Out<P> y, bool add) override;
  void cross_entropy(std::int64_t rows, std::int64_t classes, In<T> x, In<std::int32_t> labels, double smoothing,
                     Out<P> loss, Out<P> probabilities, Out<std::int32_t> correct) override;
  void cross_entropy_backward(std::int64_t rows, std::int64_t classes, In<P> probabilities, In<std::int32_t> labels,
                              double smoothing, In<P> dloss, Out<T> dx, bool add) override;

 private:
  int threads_;
  CachingAllocator& memory_;  // for scratch as large as a tensor
};

class ReferenceBackend : public Backend {
 public:
  explicit ReferenceBackend(int threads, std::unique_ptr<MemorySource> source = heap_memory());
  std::string description() const override;
  bool supports(DType dtype) const override;

  void upload(void* device, const void* host, std::size_t bytes) override { copy(device, host, bytes); }
  void download(void* host, const void* device, std::size_t bytes) override { copy(host, device, bytes); }
  void copy(void* to, const void* from, std::size_t bytes) override;
  void synchronize() override {}                                // a call returns when it is done
  void deterministic(bool) override { deterministic_ = true; }  // it always is
  void exact_convolution(bool) override {}                      // it always is
};

}  // namespace tandem::reference
