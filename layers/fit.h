// fit: the one training loop. What differs between one machine and many is the Strategy; what differs between programs are
// the arguments. A loop of your own is thirty lines with the same pieces: examples/own_loop.cpp.
#pragma once
#include <optional>

#include "core/batch.h"
#include "layers/observe.h"
#include "layers/schedule.h"
#include "layers/strategy.h"

namespace tandem {

struct FitData {
  BatchSource& train;
  BatchSource* validation = nullptr;  // to choose by
  BatchSource* test = nullptr;        // to report, never to choose by
};

struct FitOptions {
  int epochs = 1;
  Schedule schedule = {};
  std::uint64_t seed = 1;
  std::string metrics = {};  // file for JSON lines; empty: none
  bool progress = true;      // lines on stderr: one that renews itself on a terminal, one an epoch otherwise
  std::int64_t log_every = 0;  // a "step" line in the metrics every so many steps; 0: none
  ObserveOptions observe = {};
  bool overfit_batch = false;  // train on the first batch alone, until its loss is near zero: can the model learn at all?
};

struct Options;
FitOptions fit_options(const Options& options);  // epochs, schedule, seed and metrics from the command line

struct EpochReport {
  int epoch = 0;  // from 1
  double train_loss = 0, train_accuracy = 0, learning_rate = 0;
  std::optional<double> validation_loss, validation_accuracy, test_loss, test_accuracy;
  double images_per_second = 0, seconds = 0;  // of training; evaluation is not counted
};

struct FitReport {
  std::vector<EpochReport> epochs;
  std::int64_t steps = 0;
  bool stopped = false;  // by a signal or the strategy, before the last epoch
};

// Trains. After it returns, the model holds the trained weights and is in eval mode. Without a strategy the environment
// decides (strategy_from_environment). Throws NotFinite when a loss or gradient is not finite: the message names step and
// operation, and the parameters are those before that step.
FitReport fit(Module& model, Loss loss, Optimizer& optimizer, Backend& backend, const FitData& data,
              const FitOptions& options, Strategy* strategy = nullptr);

// SIGINT (Ctrl-C) or SIGTERM ends fit() after the step under way, with everything written; a second one ends the program
// at once. This is the signal that stopped the last fit() of the process, or 0; run_program makes it the exit status.
int stopping_signal();

// Mean loss (plain cross-entropy) and accuracy over a source, in eval mode, without recording; the model's mode is restored.
struct Evaluation {
  double loss = 0, accuracy = 0;
};
Evaluation evaluate(Module& model, BatchSource& source, Strategy* strategy = nullptr);

// Runs a batch again, looking at every value, and says in one line which operation first produced one that is not finite.
std::string diagnose(Module& model, const Loss& loss, ParameterSpace& space, const Batch& batch);

}  // namespace tandem
