// StepState: the small record of what varies from step to step. It lives in the device's memory and kernels read it, so that
// a recorded step can be replayed unchanged.
#pragma once
#include <cstddef>
#include <cstdint>

namespace tandem {

struct StepState {
  // What the host decides: sent to the device before each step.
  float learning_rate = 0;
  float gradient_average = 1;   // gradients that are a sum over several batches, times this, are the mean
  std::uint64_t seed = 0;
  std::uint32_t epoch = 0;      // for counter-based random numbers

  // What the device finds, and keeps: the host need not wait for it.
  std::int32_t not_finite = 0;  // set when a loss or gradient was not finite: from then on no update is applied
  float gradient_scale = 1;     // gradients are multiplied by this before use: averaging, clipping, undoing the loss scale
  float loss_scale = 1;         // what the loss was multiplied by (f16)
  std::int32_t unscaled_steps = 0;  // steps since the loss scale last changed
  std::uint64_t step = 0;       // updates applied so far
};
inline constexpr std::size_t step_from_host = offsetof(StepState, not_finite);  // bytes

}  // namespace tandem
