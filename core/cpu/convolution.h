// The convolutions of the cpu backend: one contract, three algorithms (Winograd, oneDNN, direct), and the choice
// between them.
//
// Tensors are dense (their shapes: core/cpu/pass.h); T is float or bf16. Arithmetic is f32, except where oneDNN
// multiplies bf16 (and sums in f32).
//
// The first call of a (shape, pass, type) times each applicable algorithm on the caller's own buffers and stores the
// fastest; later calls request no memory from the system. The choices, and with them the last bits of results, may
// differ between runs; deterministic(true) chooses by a rule instead. One object belongs to one backend and is used by
// one thread at a time; different objects may run at once. Errors: tandem::Error, which names operation, shapes and a
// hint.
#pragma once
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/cpu/onednn.h"
#include "core/cpu/pass.h"
#include "core/cpu/prepared.h"

namespace tandem::cpu {

// widened: oneDNN in f32 on copies of bf16 pictures, for CPUs whose bf16 instructions are slow or missing.
enum class Algorithm { winograd, direct, onednn, widened };
const char* name_of(Algorithm);
const char* name_of(Pass);

// The algorithm chosen for one shape, and the candidates.
struct Choice {
  ConvShape shape;
  Pass pass;
  DType dtype;
  Algorithm algorithm;
  std::vector<std::pair<Algorithm, double>> milliseconds;  // of each timed algorithm; empty: none was timed
  std::string library_kernel;                              // oneDNN's impl_info_str(); empty: it has none
};

class Convolution {
 public:
  Convolution(CachingAllocator& memory, int threads)
      : memory_(memory), threads_(threads), library_(memory, threads), prepared_(memory) {}

  template <class T>
  void run(const ConvCall<T>& call);
  // y = relu?(conv(x, w) + bias)
  template <class T>
  void forward(const ConvShape& s, const T* x, const float* w, WeightKey key, T* y, const Epilogue& epilogue = {}) {
    run<T>({Pass::forward, s, const_cast<T*>(x), const_cast<float*>(w), y, key, false, epilogue});
  }
  // dx (+)= ∂/∂x
  template <class T>
  void backward_data(const ConvShape& s, const T* dy, const float* w, WeightKey key, T* dx, bool add) {
    run<T>({Pass::backward_data, s, dx, const_cast<float*>(w), const_cast<T*>(dy), key, add});
  }
  // dw (+)= ∂/∂w
  template <class T>
  void backward_filter(const ConvShape& s, const T* x, const T* dy, float* dw, bool add) {
    run<T>({Pass::backward_filter, s, const_cast<T*>(x), dw, const_cast<T*>(dy), {}, add});
  }

  void exact(bool on);          // excludes Winograd
  void deterministic(bool on);  // chooses by a fixed rule, not by timing. Both discard earlier choices
  const std::vector<Choice>& choices() const { return made_; }

  // Call it when the owner of a WeightKey is destroyed, since another may be created at its address with the same
  // count.
  void forget(const void* owner);

  // For tests and benchmarks: the algorithms that apply, and one to use wherever it applies.
  template <class T>
  std::vector<Algorithm> applicable(const ConvShape&, Pass, std::string* kernel_name = nullptr);
  void only(Algorithm);

  OneDnn& library() { return library_; }  // linear layers and matrix products

 private:
  template <class T>
  Algorithm choose(const ConvCall<T>& call);
  template <class T>
  void run_with(Algorithm a, const ConvCall<T>& call);

  CachingAllocator& memory_;
  int threads_;
  OneDnn library_;
  PreparedWeights prepared_;
  bool exact_ = false, by_rule_ = false;
  std::optional<Algorithm> only_;
  std::vector<Choice> made_;
};

}  // namespace tandem::cpu
