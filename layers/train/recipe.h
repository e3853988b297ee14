// The settings of a run as text: for checkpoints, metrics, the comparison of ranks and the first lines on the screen.
#pragma once
#include <string>
#include <vector>

#include "layers/train/fit.h"

namespace tandem {

// All settings that affect the result, without the machine and the program, by the options' names.
Settings recipe_of(const FitOptions& options, const Task& task, const Optimizer& optimizer, const Strategy& strategy,
                   const BatchSource& train);
// The settings in the first line of the metrics, without the size of the run.
MetricFields recipe_fields(const Settings& settings, const std::string& optimizer, std::int64_t batch);
// Throws UsageError that names the first difference between the ranks. The location of the data may differ by host.
// All ranks call it.
void agree(Strategy& strategy, const Settings& settings, const FitOptions& options, bool resumes);

// How the ranks share a batch.
struct Cutting {
  std::int64_t pictures = 0;  // of all ranks
  int shares = 1;
  bool one_step = true;  // the gradients of all shares make one step; otherwise each rank's gradient makes one
  int times = 1;         // how many times larger the batch is than on one machine
  std::int64_t smallest() const { return pictures / shares; }
};
Cutting cutting_of(const Strategy& strategy, const BatchSource& train, const Batch& first);
// "batch 128 = 4 × 32, as on one machine".
std::string text_of(const Cutting& c, Module& model, const Strategy& strategy, const FitOptions& options, double rate);
// Warnings before the first step, about settings that probably give a worse result.
std::vector<std::string> doubts(const Cutting& c, Module& model, const FitOptions& options, double steps,
                                std::int64_t batches);

// The learning rate of every step. A copy may be used from any thread.
struct Rates {
  double given = 0, base = 0;  // as requested; after scaling with the batch
  double total = 0, steps_per_epoch = 1;
  double rise = 0;  // steps from `given` to `base`, if the schedule has no warm-up
  Schedule schedule;
  double at(double step) const {
    const double rate = step < rise ? given + (base - given) * step / rise : base;
    return rate * schedule.factor(step, total, steps_per_epoch);
  }
};
Rates rates_of(const FitOptions& options, double given, int times, double steps_per_epoch);

}  // namespace tandem
