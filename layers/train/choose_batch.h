// The tuner (layers/train/tuner.h) with a program's options and data, used by build/tune and by --batch auto.
#pragma once
#include <vector>

#include "core/backend.h"
#include "datasets/dataset.h"
#include "layers/train/options.h"
#include "layers/train/tuner.h"

namespace tandem {

struct TuneRequest {
  TunerOptions tuner = {};        // budget 0: the free memory; rates of copies are measured
  bool simulated = false;         // simulates an H200 with a virtual clock; the gradient noise is then not measured
  bool measure = false;           // also runs the plans; not on a simulated device
  std::int64_t base_batch = 128;  // for which the options' learning rate was chosen
  RateRule rule = RateRule::linear;
  int noise_steps = 200;  // of 16 pictures, before the gradient noise is measured. The noise grows during training, so
                          // few steps give a low cap
};

struct Tuned {
  std::vector<TunedBatch> rows = {};
  std::size_t best = 0;                     // the row that was chosen
  TunerOptions tuner = {};                  // with the budget and the rates that were used
  std::optional<GradientNoise> noise = {};  // after noise_steps
  std::int64_t batch = 0;                   // of a step of all ranks; with a parameter server: of a push
  double rate = 0;                          // the learning rate for this batch
  std::string schedule = {};                // with a warm-up if the rate increases and the schedule has none
};

// Takes model, type, seed, learning rate, schedule, epochs, budget, swap and scratch folder from the options. Throws
// UsageError if no batch fits, and if the rule is not compatible with the options.
Tuned tune_for(const RunConfig& options, const Dataset& data, Backend& backend, const TuneRequest& request = {});

// If options.batch is 0 (--batch auto): chooses batch, learning rate and schedule, and prints them on stderr.
void choose_batch(RunConfig& options, const Dataset& data, Backend& backend);

}  // namespace tandem
