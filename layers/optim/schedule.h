// Learning-rate schedules: a factor on the base learning rate as a function of the progress of the run.
#pragma once
#include <string>
#include <vector>

namespace tandem {

struct Schedule {
  enum class Kind { constant, step, cosine, one_cycle } kind = Kind::constant;
  std::vector<double> milestones;  // step: epochs at which the factor is multiplied by gamma
  double every = 0, gamma = 0.1;   // step: or the interval between these epochs
  double warmup = 0;               // epochs of linear warm-up, for all kinds but one_cycle
  // one_cycle, as PyTorch's OneCycleLR with cosine annealing: from 1/start up to 1 in the first `rise` of the run, down
  // to 1/(start·finish) at the end.
  double rise = 0.3, start = 25, finish = 1e4;

  // The factor for update `step` (from 0) of `total`, with `steps_per_epoch` updates per epoch.
  double factor(double step, double total, double steps_per_epoch) const;

  // "constant", "cosine", "one-cycle", "step:30:0.1" (every 30 epochs), "step:100,150:0.1" (at these epochs);
  // "warmup:5+cosine" adds five epochs of linear warm-up at the beginning. Throws UsageError that lists the forms.
  static Schedule parse(const std::string& text);
};

// How a learning rate is scaled when the batch is n times as large (weak scaling).
enum class RateScale {
  none,
  square_root,  // √n times the rate
  linear,       // n times the rate (Goyal et al. 2017)
  clipped,  // n times the rate; gradients with a norm above 4/n are scaled down to the norm 4/n. For any n a step is at
            // most four times as long as the step of the unscaled rate with a gradient of norm 1
};
inline double clip_of(RateScale scale, int n) { return scale == RateScale::clipped ? 4.0 / n : 0; }
const char* name_of(RateScale scale);  // "none", "sqrt", "linear", "clipped"
double scaled(RateScale scale, double rate, int n);

}  // namespace tandem
