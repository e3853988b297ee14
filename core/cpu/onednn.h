// oneDNN: convolutions, inner products and matrix products from the library. All of the project's calls to it are in
// onednn.cpp, which is written for the interfaces of versions 2 and 3.
//
// The library chooses the layout of the weights (with a fixed one it may use a reference kernel that is hundreds of
// times slower). Weights are reordered into that layout; the result is kept until their WeightKey changes. Pictures
// stay NHWC. Primitives are made once per shape. Nothing here is shared between objects; use an object from one thread
// at a time. Errors: tandem::Error, which names operation, shapes and a hint. bf16 needs AVX-512 with bf16
// instructions.
#pragma once
#include <memory>
#include <string>

#include "core/cpu/pass.h"

namespace tandem::cpu {

class OneDnn {
 public:
  OneDnn(CachingAllocator& memory, int threads);
  ~OneDnn();
  static std::string version();  // "oneDNN 2.6.3, AVX-512 with bf16"
  static bool has_bf16();        // the CPU multiplies bf16 natively

  // The kernel that the library would use: impl_info_str(), or empty if it has none. reference(): the name begins with
  // "ref"; such a kernel is hundreds of times slower and is avoided.
  struct Kernel {
    std::string name;
    bool reference() const { return name.rfind("ref", 0) == 0; }
  };
  template <class T>
  Kernel kernel(const ConvShape&, Pass);

  template <class T>
  void convolution(const ConvCall<T>&);

  // A fully connected layer, y[m, n] = relu?(x[m, k]·w[n, k]ᵀ + bias[n]), or one of its gradients: the call's shape is
  // linear_shape(m, n, k).
  template <class T>
  void linear(const ConvCall<T>&);
  static ConvShape linear_shape(std::int64_t m, std::int64_t n, std::int64_t k) {
    return {.n = m, .h = 1, .w = 1, .c_in = k, .c_out = n};
  }

  // c[m, n] (+)= op(a)·op(b), all row-major and dense; a is [m, k], or [k, m] when transposed.
  template <class T>
  void gemm(bool transpose_a, bool transpose_b, std::int64_t m, std::int64_t n, std::int64_t k, const T* a, const T* b,
            T* c, bool add);

  // Drops the prepared copies of these weights. Call it when an owner is destroyed, since another may be created at its
  // address.
  void forget(const void* owner);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tandem::cpu
