// StepState: the small record of what varies from step to step. It lives in the device's memory and kernels read it, so that
// a recorded step can be replayed unchanged.
#pragma once
#include <cstdint>

namespace tandem {

struct StepState {
  float learning_rate = 0;
  float gradient_scale = 1;     // gradients are multiplied by this before use: averaging, clipping, undoing the loss scale
  float gradient_average = 1;   // gradients that are a sum over several batches, times this, are the mean
  float loss_scale = 1;         // what the loss was multiplied by (f16)
  std::uint32_t epoch = 0;      // for counter-based random numbers
  std::uint64_t seed = 0;
  std::uint64_t step = 0;       // updates applied so far
  std::int32_t not_finite = 0;  // set when a loss or gradient was not finite: from then on no update is applied
};

}  // namespace tandem
