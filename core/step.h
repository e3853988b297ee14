// StepState: the small record of what varies from step to step. It lives in the device's memory and kernels read it, so that
// a recorded step can be replayed unchanged.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/hd.h"

namespace tandem {

struct StepState {
  // What the host decides: sent to the device before each step.
  float learning_rate = 0;
  float gradient_average = 1;   // gradients that are a sum over several batches, times this, are the mean
  std::uint64_t seed = 0;
  std::uint32_t epoch = 0;      // for counter-based random numbers

  // What the device finds, and keeps: the host need not wait for it.
  // 0: the update was applied. 1: a loss or gradient was not finite, and from then on none is. 2: the loss scale was too
  // large for this step's gradients, which are skipped; the next step tries a smaller one. 3: it was 1, and somebody has
  // looked: the next step is as any other.
  std::int32_t not_finite = 0;
  float gradient_scale = 1;     // gradients are multiplied by this before use: averaging, clipping, undoing the loss scale
  float loss_scale = 1;         // what the loss was multiplied by (f16)
  std::int32_t unscaled_steps = 0;  // steps since the loss scale last changed
  std::uint64_t step = 0;       // updates applied so far
  std::uint64_t skipped = 0;    // steps that overflowed and were not
};
// Dynamic loss scaling, for f16: a loss times a power of two lifts small gradients above what f16 rounds to zero. The scale
// doubles after so many steps without an overflow and is halved by each, whose step is skipped. At scale 1 an overflow is a
// gradient that is not finite.
struct LossScaling {
  float first = 65536, most = 16777216;
  std::int32_t patience = 2000;
};

// Decides about a step whose gradients (and loss) are finite or not: sets not_finite, the scale and its counter. True when the
// update is to be applied. Without scaling (scaled = false) the scale stays as it is.
TANDEM_HD inline bool check_step(StepState& s, bool finite, bool scaled, const LossScaling& scaling) {
  if (s.not_finite == 1) return false;
  s.not_finite = 0;
  if (!finite) {
    s.not_finite = scaled && s.loss_scale > 1 ? 2 : 1;
    if (s.not_finite == 2) s.loss_scale *= 0.5f, s.skipped++;
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
