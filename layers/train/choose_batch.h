// The tuner (layers/train/tuner.h) with a program's options and data: what build/tune prints, and what --batch auto
// takes.
#pragma once
#include <vector>

#include "core/backend.h"
#include "datasets/dataset.h"
#include "layers/train/options.h"
#include "layers/train/tuner.h"

namespace tandem {

struct TuneRequest {
  TunerOptions tuner = {};  // budget 0: the memory that is free; rates of copies are measured
  bool simulated = false;  // on an H200 with a virtual clock instead of here. The gradient's noise is not measured then
  bool measure = false;    // run the plans too; not on a simulated device
  std::int64_t base_batch = 128;  // for which the options' learning rate was chosen
  RateRule rule = RateRule::linear;
  int noise_steps = 200;  // of 16 pictures, before the gradient's noise is measured. It grows while a model trains: few
                          // steps, a low cap
};

struct Tuned {
  std::vector<TunedBatch> rows = {};
  std::size_t best = 0;                     // the row that was chosen
  TunerOptions tuner = {};                  // with the budget and the rates that were used
  std::optional<GradientNoise> noise = {};  // after noise_steps
  std::int64_t batch = 0;                   // of a step of all ranks; with a parameter server: of a push
  double rate = 0;                          // the learning rate for it
  std::string schedule = {};                // with a warm-up where the rate rises and the schedule has none
};

// Takes model, type, seed, learning rate, schedule, epochs, budget, swap and scratch folder from the options. Throws
// UsageError where nothing fits, and where the rule does not go with the options.
Tuned tune_for(const Options& options, const Dataset& data, Backend& backend, const TuneRequest& request = {});

// Where options.batch is 0 (--batch auto): chooses batch, learning rate and schedule, and says so on stderr.
void choose_batch(Options& options, const Dataset& data, Backend& backend);

// An H200 at rates that kernels reach (our choice: half of the peak of 67 TFLOP/s in f32 and 990 in bf16, four fifths
// of the memory's 4.8 TB/s) and PCIe 5.
SimulatedRates h200_rates(DType dtype);

}  // namespace tandem
