// The kernels of the cpu backend, of which those of memory-bound operations are in norm.cpp, pool.cpp and rows.cpp.
// Results depend on the number of threads (the order of a sum) and on nothing else.
#pragma once
#include "core/backend.h"
#include "core/cpu/convolution.h"

namespace tandem::cpu {

// The state of a tensor's memory; of weights only where prepared forms are kept for them: for parameters.
inline WeightKey state_of(const Tensor& t) { return {&t.writes(), t.writes().now()}; }
inline WeightKey key_of(In<float> w) {
  return &w.tensor->writes() == w.tensor->storage()->whole() ? WeightKey{} : state_of(*w.tensor);
}

// The data that all kernels of a backend share.
struct Shared {
  int threads;
  Convolution convolution;
  Moments moments = {};     // that the last convolution took of its result,
  WeightKey measured = {};  // which is this tensor, written so many times
};

template <class T>
class CpuKernels final : public Kernels<T> {
 public:
  explicit CpuKernels(Shared& shared) : shared_(shared), threads_(shared.threads) {}

  // backend.cpp
  void gemm(bool transpose_a, bool transpose_b, std::int64_t batch, std::int64_t m, std::int64_t n, std::int64_t k,
            In<T> a, In<T> b, Out<T> c, bool add) override;
  void linear(std::int64_t m, std::int64_t n, std::int64_t k, In<T> x, In<float> w, In<float> bias, bool relu,
              Out<T> y) override;
  void linear_backward_data(std::int64_t m, std::int64_t n, std::int64_t k, In<T> dy, In<float> w, Out<T> dx,
                            bool add) override;
  void linear_backward_weight(std::int64_t m, std::int64_t n, std::int64_t k, In<T> x, In<T> dy, Out<float> dw,
                              bool add) override;
  void conv2d(const ConvShape& s, In<T> x, In<float> w, In<float> bias, bool relu, Out<T> y) override;
  void conv2d_backward_data(const ConvShape& s, In<T> dy, In<float> w, Out<T> dx, bool add) override;
  void conv2d_backward_filter(const ConvShape& s, In<T> x, In<T> dy, Out<float> dw, bool add) override;

  // pool.cpp: vectors along c, threads along rows of pictures
  void max_pool(const PoolShape& s, In<T> x, bool relu, Out<T> y, Out<std::uint8_t> argmax) override;
  void max_pool_backward(const PoolShape& s, In<T> dy, In<std::uint8_t> argmax, Out<T> dx, bool add) override;
  void average_pool(const PoolShape& s, In<T> x, Out<T> y) override;
  void average_pool_backward(const PoolShape& s, In<T> dy, Out<T> dx, bool add) override;

  // norm.cpp
  void batch_norm(const NormShape& s, In<T> x, In<T> residual, In<float> gamma, In<float> beta, Out<float> running_mean,
                  Out<float> running_variance, Out<T> y, Out<float> mean, Out<float> inverse_std) override;
  void normalise(const NormShape& s, In<T> x, In<T> residual, In<float> gamma, In<float> beta, In<float> mean,
                 In<float> spread, bool is_variance, Out<T> y) override;
  void batch_norm_backward(const NormShape& s, In<T> x, In<T> y, In<T> dy, In<float> gamma, In<float> beta,
                           In<float> mean, In<float> inverse_std, const NormOutputs<T, float>& out) override;

  // rows.cpp: sums are kept in double from block to block
  void sum_rows(std::int64_t rows, std::int64_t channels, In<T> dy, Out<float> db, bool add) override;
  void reduce(Reduction op, std::int64_t outer, std::int64_t middle, std::int64_t inner, In<T> x, Out<T> y,
              bool add) override;
  void squared_norm(std::int64_t n, In<T> x, Out<float> y, bool add) override;
  void cross_entropy(std::int64_t rows, std::int64_t classes, In<T> x, In<std::int32_t> labels, double smoothing,
                     Out<float> loss, Out<float> probabilities, Out<std::int32_t> correct) override;
  void cross_entropy_backward(std::int64_t rows, std::int64_t classes, In<float> probabilities, In<std::int32_t> labels,
                              double smoothing, In<float> dloss, Out<T> dx, bool add) override;

 private:
  Shared& shared_;
  int threads_;
};

}  // namespace tandem::cpu
