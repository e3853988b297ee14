// The kernels of the cpu backend: convolutions and matrix products go to Convolution (Winograd, oneDNN, direct); those
// of memory-bound operations are in norm.cpp, pool.cpp and rows.cpp.
// For the same choice of algorithms, results depend only on the number of threads (the order of a sum).
#pragma once
#include "core/backend.h"
#include "core/cpu/convolution.h"

namespace tandem::cpu {

// The state of a tensor's memory. key_of() is empty unless w is a parameter: only parameters have prepared forms.
inline WeightKey state_of(const Tensor& t) { return {&t.writes(), t.writes().now()}; }
inline WeightKey key_of(In<float> w) {
  return &w.tensor->writes() == w.tensor->storage()->whole() ? WeightKey{} : state_of(*w.tensor);
}

// The data that all kernels of a backend share.
struct Shared {
  int threads;
  Convolution convolution;
  Moments moments = {};     // the sums of the result of the last convolution
  WeightKey measured = {};  // identifies that result
};

template <class T>
class CpuKernels final : public Kernels<T> {
 public:
  explicit CpuKernels(Shared& shared) : shared_(shared), threads_(shared.threads) {}

  void gemm(bool transpose_a, bool transpose_b, std::int64_t batch, std::int64_t m, std::int64_t n, std::int64_t k,
            In<T> a, In<T> b, Out<T> c, bool add) override {
    for (std::int64_t i = 0; i < batch; i++)
      shared_.convolution.library().gemm<T>(transpose_a, transpose_b, m, n, k, a + i * m * k, b + i * k * n,
                                            c + i * m * n, add);
  }
  // The passes of a layer overwrite one of x, w and y, and only read the other two.
  void linear(std::int64_t m, std::int64_t n, std::int64_t k, In<T> x, In<float> w, In<float> bias, bool relu,
              Out<T> y) override {
    const Epilogue epilogue{bias, relu};
    shared_.convolution.library().linear<T>({Pass::forward, OneDnn::linear_shape(m, n, k), const_cast<T*>(x.data),
                                             const_cast<float*>(w.data), y, key_of(w), false, epilogue});
  }
  void linear_backward_data(std::int64_t m, std::int64_t n, std::int64_t k, In<T> dy, In<float> w, Out<T> dx,
                            bool add) override {
    shared_.convolution.library().linear<T>({Pass::backward_data, OneDnn::linear_shape(m, n, k), dx,
                                             const_cast<float*>(w.data), const_cast<T*>(dy.data), key_of(w), add});
  }
  void linear_backward_weight(std::int64_t m, std::int64_t n, std::int64_t k, In<T> x, In<T> dy, Out<float> dw,
                              bool add) override {
    const WeightKey none;
    shared_.convolution.library().linear<T>({Pass::backward_filter, OneDnn::linear_shape(m, n, k),
                                             const_cast<T*>(x.data), dw, const_cast<T*>(dy.data), none, add});
  }
  void conv2d(const ConvShape& s, In<T> x, In<float> w, In<float> bias, bool relu, Out<T> y) override {
    Moments* moments = bias || relu ? nullptr : &shared_.moments;  // without these a batch norm may follow
    shared_.convolution.forward<T>(s, x, w, key_of(w), y, {bias, relu, moments});
    if (moments) shared_.measured = state_of(*y.tensor);
  }
  void conv2d_backward_data(const ConvShape& s, In<T> dy, In<float> w, Out<T> dx, bool add) override {
    shared_.convolution.backward_data<T>(s, dy, w, key_of(w), dx, add);
  }
  void conv2d_backward_filter(const ConvShape& s, In<T> x, In<T> dy, Out<float> dw, bool add) override {
    shared_.convolution.backward_filter<T>(s, x, dy, dw, add);
  }

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
