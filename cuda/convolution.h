// Convolutions by cuDNN: one plan (plans.h) for each pass of each shape, timed on the device once and kept. If no
// engine supports a shape, Tandem's own simple kernels compute it.
#pragma once
#include <functional>
#include <memory>
#include <optional>

#include "cuda/kernels.h"
#include "cuda/plans.h"

namespace tandem::cuda {

// The candidate to keep: the fastest one that runs or, with `first`, the first one that runs. A candidate that does not
// run (its workspace is too large, or the library refuses it) has no time and is ignored. None: no candidate runs.
std::optional<std::size_t> choose(std::size_t candidates, bool first,
                                  const std::function<std::optional<float>(std::size_t)>& milliseconds);

class Convolution {
 public:
  Convolution(const Grid& grid, CachingAllocator& memory);
  ~Convolution();
  Convolution(const Convolution&) = delete;

  // y = relu?(x ∗ w + bias). The bias and the ReLU are part of cuDNN's plan if a plan that has them is the fastest,
  // else a separate kernel after the convolution computes them.
  void forward(const ConvShape&, DType, const Operands&, bool relu);
  void backward_data(const ConvShape&, DType, const void* dy, const void* w, void* dx, bool add);
  void backward_filter(const ConvShape&, DType, const void* x, const void* dy, float* dw, bool add);

  void rules(const EngineRules& rules);  // drops all plans if the rules change
  EngineRules rules() const;
  // While a step is recorded no plan can be timed, so a new key gets the first acceptable plan.
  void recording(bool on);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tandem::cuda
