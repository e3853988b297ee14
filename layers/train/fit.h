// fit: the training loop. The Strategy selects one machine or several; the arguments contain everything that differs
// between programs. examples/own_loop.cpp builds its own loop from the same parts in thirty lines.
#pragma once
#include <optional>
#include <vector>

#include "core/batch.h"
#include "layers/train/evaluate.h"
#include "layers/train/metrics.h"
#include "layers/train/run_config.h"
#include "layers/train/strategy.h"

namespace tandem {

struct FitData {
  BatchSource& train;
  BatchSource* validation = nullptr;  // used to choose the best epoch
  BatchSource* test = nullptr;        // reported only
};

struct EpochReport {
  int epoch = 0, first = 0;  // from 1; first: of several epochs that asynchronous ranks ended since rank 0's last check
  double train_loss = 0, learning_rate = 0;
  std::optional<double> validation_loss{}, test_loss{};
  std::optional<double> train_accuracy{}, validation_accuracy{}, test_accuracy{};  // if the task has one
  std::vector<double> class_accuracy = {};  // on the test data, or without, on the validation data
  bool several() const { return first > 0 && first < epoch; }
  double images_per_second = 0, seconds = 0;  // of training; includes evaluation only if other ranks train meanwhile
};

MetricFields fields_of(const EpochReport& e);           // its line in the metrics
std::string line_of(const EpochReport& e, int epochs);  // its line on the screen

struct FitReport {
  std::vector<EpochReport> epochs;
  std::int64_t steps = 0;
  bool stopped = false;                  // before the last epoch
  int best_epoch = 0;                    // from 1; of the whole run
  std::vector<std::string> differences;  // from the resumed run: why this run may not give the same bits
};

// Trains the model for a task: classification(), regression(), multi_label() (layers/train/task.h); a loss without a
// task means classification with this loss. After fit() returns, the model has the trained weights (with ema: their
// average) and is in eval mode. Without a strategy the environment determines it (strategy_from_environment). Throws
// NotFinite when a loss or gradient is not finite: the message names step and operation, and the parameters are those
// before that step.
FitReport fit(Module& model, const Task& task, Optimizer& optimizer, Backend& backend, const FitData& data,
              const RunConfig& options, Strategy* strategy = nullptr);

// SIGINT (Ctrl-C) or SIGTERM ends fit() after the current step, or the current batch of an evaluation, and all files
// are written; a second signal ends the program at once. Returns the signal that stopped the last fit(), or 0;
// run_program derives the exit status from it.
int stopping_signal();
// True for SIGUSR1, SIGUSR2 and SIGXCPU, with which a batch system announces the end of the time limit. They stop fit()
// in the same way, and may come again.
bool warns_of_the_end(int signal);

}  // namespace tandem
