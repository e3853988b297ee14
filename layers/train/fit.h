// fit: the training loop. The Strategy selects one machine or several; the arguments contain everything that differs
// between programs. examples/own_loop.cpp builds its own loop from the same parts in thirty lines.
#pragma once
#include <memory>
#include <optional>
#include <vector>

#include "autograd/memory_choice.h"
#include "core/batch.h"
#include "layers/optim/schedule.h"
#include "layers/train/callback.h"
#include "layers/train/checkpoint.h"
#include "layers/train/evaluate.h"
#include "layers/train/metrics.h"
#include "layers/train/profiler.h"
#include "layers/train/strategy.h"

namespace tandem {

struct FitData {
  BatchSource& train;
  BatchSource* validation = nullptr;  // used to choose the best epoch
  BatchSource* test = nullptr;        // reported only
};

struct ImportExportFiles {  // empty: none
  std::string import_torch = {}, export_torch = {}, export_onnx = {};
  std::string tensorboard = {};  // a folder
};

struct FitOptions {
  int epochs = 1;
  Schedule schedule = {};
  // How the learning rate is scaled if the batch grows with the ranks (LoaderOptions::batch_per_rank). The rate rises
  // over the first five epochs, or a tenth of a shorter run, unless the schedule has a warm-up (Goyal et al. 2017).
  RateScale lr_scale = RateScale::clipped;
  std::uint64_t seed = 1;
  std::string metrics = {};    // file for JSON lines; empty: none
  bool progress = true;        // on stderr: one line that is updated on a terminal, else one line per epoch
  std::int64_t log_every = 0;  // steps between two "step" lines in the metrics; 0: none
  ProfilerOptions profiler = {};
  // Trains on the first batch only until its loss is near zero: a test that the model can learn. Throws Error when it
  // does not learn, or when there are too few steps to decide.
  bool overfit_batch = false;
  ImportExportFiles import_export = {};

  // Bytes of the device's memory that the run may take; 0: all. With a budget, tensors that a step saves for backward
  // are kept, swapped to `scratch` or recomputed, as `swap` allows (autograd/memory_plan.h). A budget that is too small
  // is refused after the second step's passes, with the smallest sufficient one. scratch: a folder (empty: $TMPDIR,
  // then /tmp); on a GPU the kind of host memory, "pinned" (also empty) or "unified".
  std::size_t memory_budget = 0;
  SwapMode swap = SwapMode::automatic;
  std::string scratch = {};
  int accumulate = 1;            // batches per step (layers/optim/accumulation.h)
  bool sync_batch_norm = false;  // statistics over the pictures of all ranks
  // Decay of a moving average of the weights (layers/optim/ema.h), which is then evaluated; 0: none
  double ema = 0;
  int patience = 0;  // stop after this many epochs without a better validation; 0: never
  // Folder for last.safetensors, written after every epoch and when the run is stopped, and best.safetensors, written
  // after an epoch that was the best so far: by validation accuracy, or without validation by training loss. The folder
  // is refused when it has checkpoints of another run, or while another process writes there.
  std::string checkpoint = {};
  bool evaluate = false;  // no training: report the results of the weights of `resume` or `import_export.import_torch`
                          // on the test data
  std::string resume = {};  // a checkpoint, or a folder with last.safetensors, in which checkpoints are then written
  std::int64_t stop_after = 0;  // stop at this step of the run; 0: never. If the step is over, nothing is trained
  std::vector<std::shared_ptr<Callback>> callbacks = {};  // of the program (layers/train/callback.h)
  Settings settings = {};                                 // stored in checkpoints, besides the options that fit knows
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
              const FitOptions& options, Strategy* strategy = nullptr);

// SIGINT (Ctrl-C) or SIGTERM ends fit() after the current step, or the current batch of an evaluation, and all files
// are written; a second signal ends the program at once. Returns the signal that stopped the last fit(), or 0;
// run_program derives the exit status from it.
int stopping_signal();
// True for SIGUSR1, SIGUSR2 and SIGXCPU, with which a batch system announces the end of the time limit. They stop fit()
// in the same way, and may come again.
bool warns_of_the_end(int signal);

}  // namespace tandem
