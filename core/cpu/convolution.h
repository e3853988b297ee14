// The convolutions of the cpu backend: one contract, three algorithms (Winograd, oneDNN, direct), and the choice
// between them.
//
// Pictures x[n, h, w, c_in], filters w[c_out, kh, kw, c_in / groups], results y[n, out_h, out_w, c_out], dense. T is
// float or bf16; weights and their gradients are always float. Arithmetic is f32, except where oneDNN multiplies bf16
// (and sums in f32).
//
// The first call of a (shape, pass, type) tries each algorithm that applies on the caller's own buffers and remembers
// the fastest; the second call and those after it ask the system for no memory. Choices, and so the last bits of
// results, may differ between runs: deterministic(true) chooses by a rule instead. One object belongs to one backend
// and is used from one thread at a time; different objects may run at once. Errors: tandem::Error that names operation,
// shapes and a hint.
#pragma once
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/cpu/onednn.h"
#include "core/cpu/scratch.h"
#include "core/dtype.h"
#include "core/shape.h"

namespace tandem::cpu {

// widened: oneDNN in f32 on copies of bf16 pictures, for CPUs whose bf16 instructions are slow or missing.
enum class Algorithm { winograd, direct, onednn, widened };
const char* name_of(Algorithm);
const char* name_of(Pass);

// What was chosen for one shape, and what it was chosen from.
struct Choice {
  ConvShape shape;
  Pass pass;
  DType dtype;
  Algorithm algorithm;
  std::vector<std::pair<Algorithm, double>> milliseconds;  // of each that was tried; empty when chosen by rule or alone
  std::string library_kernel;                              // oneDNN's impl_info_str(), where it was asked
};

class Convolution {
 public:
  Convolution(Scratch&, int threads);
  ~Convolution();

  // y = relu?(conv(x, w) + bias)
  template <class T>
  void forward(const ConvShape&, const T* x, const float* w, WeightKey, T* y, const Epilogue& = {});
  // dx (+)= ∂/∂x; old contents of dx are not read unless add.
  template <class T>
  void backward_data(const ConvShape&, const T* dy, const float* w, WeightKey, T* dx, bool add);
  // dw (+)= ∂/∂w
  template <class T>
  void backward_filter(const ConvShape&, const T* x, const T* dy, float* dw, bool add);

  void exact(bool on);          // leaves Winograd out
  void deterministic(bool on);  // a fixed rule chooses, not a stopwatch. Both forget earlier choices
  std::vector<Choice> choices() const;

  // Call it when the owner of a WeightKey is destroyed, since another may be created at its address with the same
  // count.
  void forget(const void* owner);

  // For tests and benchmarks: the algorithms that apply, and one to use wherever it applies.
  template <class T>
  std::vector<Algorithm> applicable(const ConvShape&, Pass);
  void only(Algorithm);

  OneDnn& library();  // linear layers and matrix products

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tandem::cpu
