// oneDNN: convolutions, inner products and matrix products from the library. All of the project's calls to it are in
// onednn.cpp, which is written for the interfaces of versions 2 and 3.
//
// The library chooses the layout of the weights (with a fixed one it may fall to a reference kernel hundreds of times
// slower); weights are reordered into that layout, and the result is kept until their WeightKey changes.
// Pictures stay NHWC. Primitives are made once per shape. Nothing here is shared between objects; use an object from
// one thread at a time. Errors: tandem::Error naming operation, shapes and a hint. bf16 needs AVX-512 with bf16
// instructions.
#pragma once
#include <memory>
#include <string>

#include "core/cpu/scratch.h"
#include "core/dtype.h"
#include "core/shape.h"

namespace tandem::cpu {

enum class Pass { forward, backward_data, backward_filter };

class OneDnn {
 public:
  OneDnn(Scratch&, int threads);
  ~OneDnn();
  static std::string version();  // "oneDNN 2.6.3, AVX-512 with bf16"
  static bool has_bf16();        // the CPU multiplies bf16 natively

  // The kernel the library would use: impl_info_str(), or empty when it has none. `reference` when its name begins with
  // "ref": correct, but hundreds of times slower. These are avoided.
  struct Kernel {
    std::string name;
    bool reference() const { return name.rfind("ref", 0) == 0; }
  };
  template <class T>
  Kernel kernel(const ConvShape&, Pass);

  // As in Convolution.
  template <class T>
  void forward(const ConvShape&, const T* x, const float* w, WeightKey, T* y, const Epilogue&);
  template <class T>
  void backward_data(const ConvShape&, const T* dy, const float* w, WeightKey, T* dx, bool add);
  template <class T>
  void backward_filter(const ConvShape&, const T* x, const T* dy, float* dw, bool add);

  // y[m, n] = relu?(x[m, k]·w[n, k]ᵀ + bias[n]) and its gradients.
  template <class T>
  void linear_forward(std::int64_t m, std::int64_t n, std::int64_t k, const T* x, const float* w, WeightKey,
                      const float* bias, bool relu, T* y);
  template <class T>
  void linear_backward_data(std::int64_t m, std::int64_t n, std::int64_t k, const T* dy, const float* w, WeightKey,
                            T* dx, bool add);
  template <class T>
  void linear_backward_weights(std::int64_t m, std::int64_t n, std::int64_t k, const T* x, const T* dy, float* dw,
                               bool add);

  // c[m, n] = alpha·op(a)·op(b) + beta·c, all row-major and dense; a is [m, k], or [k, m] when transposed. With beta =
  // 0 old contents of c are never read.
  template <class T>
  void gemm(bool transpose_a, bool transpose_b, std::int64_t m, std::int64_t n, std::int64_t k, float alpha, const T* a,
            const T* b, float beta, T* c);

  // Drops the prepared copies of these weights. Call it when an owner is destroyed, since another may be created at its
  // address.
  void forget(const void* owner);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tandem::cpu
