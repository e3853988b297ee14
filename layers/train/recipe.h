// The settings of a run as text: for checkpoints, metrics, the comparison of ranks and the first lines on the screen.
#pragma once
#include <string>
#include <vector>

#include "layers/train/fit.h"

namespace tandem {

// All settings that change the result, besides the machine and the program, by the options' names.
Settings recipe_of(const FitOptions& options, const Task& task, const Optimizer& optimizer, const Strategy& strategy,
                   const BatchSource& train);
// The settings in the first line of the metrics, besides the size of the run.
MetricFields recipe_fields(const Settings& settings, const std::string& optimizer, std::int64_t batch);
// Throws UsageError that names the first difference between the ranks. Where the data lie may differ from host to host.
// All ranks call it.
void agree(Strategy& strategy, const Settings& settings, const FitOptions& options, bool resumes);

// How the ranks share a batch.
struct Cutting {
  std::int64_t pictures = 0;  // of all ranks
  int shares = 1;
  bool one_step = true;  // the shares' gradients make one step; otherwise each rank's makes one
  int times = 1;         // larger than one machine's
  std::int64_t smallest() const { return pictures / shares; }
};
Cutting cutting_of(const Strategy& strategy, const BatchSource& train, const Batch& first);
// "batch 128 = 4 × 32, as on one machine".
std::string text_of(const Cutting& c, Module& model, const Strategy& strategy, const FitOptions& options, double rate);
// Warnings before the first step, about settings that probably give a worse result.
std::vector<std::string> doubts(const Cutting& c, Module& model, const FitOptions& options, double steps,
                                std::int64_t batches);

// The learning rate of every step. A copy may be asked from any thread.
struct Rates {
  double given = 0, base = 0;  // as asked for; after scaling with the batch
  double total = 0, steps_per_epoch = 1;
  double rise = 0;  // steps from `given` to `base`, where the schedule does not warm up by itself
  Schedule schedule;
  double at(double step) const {
    const double rate = step < rise ? given + (base - given) * step / rise : base;
    return rate * schedule.factor(step, total, steps_per_epoch);
  }
};
Rates rates_of(const FitOptions& options, double given, int times, double steps_per_epoch);

}  // namespace tandem
