// StepState: the values that change from step to step. They are in device memory, from which kernels read them, so that
// a recorded step can be replayed unchanged.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/hd.h"

namespace tandem {

struct StepState {
  // Set by the host and sent to the device before each step.
  float learning_rate = 0;
  float gradient_average = 1;  // factor that converts a sum of gradients over several batches into their mean
  std::uint64_t seed = 0;
  std::uint32_t epoch = 0;  // for counter-based random numbers

  // Written by the device; the host need not wait for it.
  // 0: the update was applied. 1: a loss or gradient was not finite; no further update is applied. 2: the gradients
  // overflowed because of the loss scale; this update was skipped and the scale halved. 3: the value was 1 and the host
  // has read it; the next step is treated normally.
  std::int32_t not_finite = 0;
  float gradient_scale = 1;         // factor on gradients before use: averaging, clipping, undoing the loss scale
  float loss_scale = 1;             // factor on the loss (f16)
  std::int32_t unscaled_steps = 0;  // steps since the loss scale last changed
  std::uint64_t step = 0;           // updates applied so far
  std::uint64_t skipped = 0;        // steps skipped because their gradients overflowed
};
// Dynamic loss scaling for f16. The loss is multiplied by a power of two, so that small gradients are not rounded to
// zero. The scale doubles after `patience` steps without an overflow. An overflow halves the scale and skips the step.
// At scale 1 an overflow counts as a gradient that is not finite.
struct LossScaling {
  float first = 65536, most = 16777216;
  std::int32_t patience = 2000;
};

// Updates not_finite, the loss scale and its counter for a step. finite: the loss and all gradients are finite. scaled:
// loss scaling is on; otherwise the scale does not change. Returns true when the update is to be applied.
TANDEM_HD inline bool check_step(StepState& s, bool finite, bool scaled, const LossScaling& scaling) {
  if (s.not_finite == 1) return false;
  s.not_finite = 0;
  if (!finite) {
    s.not_finite = scaled && s.loss_scale > 1 ? 2 : 1;
    if (s.not_finite == 2) {
      s.loss_scale *= 0.5f;
      s.skipped++;
    }
    s.unscaled_steps = 0;
    return false;
  }
  if (scaled && ++s.unscaled_steps >= scaling.patience) {
    s.unscaled_steps = 0;
    if (s.loss_scale < scaling.most) s.loss_scale *= 2;
  }
  return true;
}

inline constexpr std::size_t step_from_host = offsetof(StepState, not_finite);  // bytes

}  // namespace tandem
