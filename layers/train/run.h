// Run: the state of one call of fit(), used by its loop and its callbacks.
#pragma once
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "autograd/memory_plan.h"
#include "layers/optim/accumulation.h"
#include "layers/train/callback.h"
#include "layers/train/fit.h"

namespace tandem {

// All settings that affect the result, without the machine and the program, by the options' names.
Settings recipe_of(const RunConfig& options, const Task& task, const Optimizer& optimizer, const Strategy& strategy,
                   const BatchSource& train);
// The settings in the first line of the metrics, without the size of the run.
MetricFields recipe_fields(const Settings& settings, const std::string& optimizer, std::int64_t batch);
// Throws UsageError that names the first difference between the ranks. The location of the data may differ by host.
// All ranks call it.
void agree(Strategy& strategy, const Settings& settings, const RunConfig& options, bool resumes);

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
Schedule schedule_of(const RunConfig& options);
Rates rates_of(const RunConfig& options, double given, int times, double steps_per_epoch);

// The memory that a training step will need in addition to the memory already in use, computed before the first step:
// if there is too little memory, the operating system ends the process without a message.
struct StepMemory {
  // Activations and their gradients at the peak of a step, and the picture in all batches that exist at a time
  std::size_t per_picture = 0;
  std::size_t left = 0;  // on the model's device, for this rank; −1: unknown
  std::int64_t fits() const { return per_picture ? std::int64_t(left / per_picture) : 0; }  // the largest batch
};

// Runs the model forward on two pictures of this shape [N, H, W, C], on its own device, and measures the tape
// (layers/export/summary.h). This takes some milliseconds. Scratch memory of kernels and the tape's nodes are estimated
// as a tenth of the rest.
StepMemory step_memory(Module& model, const Tensor& images);

// Throws UsageError when a step on such a batch cannot fit; the message has the needed memory, the available memory and
// the largest batch that fits. It costs nothing if the batch is small compared to the memory. Parameters, their
// gradients, the optimizer's state and the data set are already allocated, and so are not counted as available.
void require_memory(Module& model, const Batch& batch);

class Run {
 public:
  // Checks the options, compares them with the other ranks, allocates the parameters and loads the run to resume.
  Run(Module& model, const Task& task, Optimizer& optimizer, Backend& backend, const FitData& data,
      const RunConfig& options, Strategy& strategy);
  ~Run();
  Run(const Run&) = delete;

  // ---- steps of the loop --------------------------------------------------------------------------------------------
  void begin();
  bool has_epochs() const { return position.epoch < options.epochs && !report.stopped; }
  void begin_epoch();
  bool next_batch();  // false: the epoch has no further batch
  void begin_step();
  void forward_backward();  // forward, loss, backward; only queues work on a device
  void exchange();          // on the host
  void update();            // only queues work on a device
  void finish();            // on the host
  void end_step();          // throws NotFinite where this or an earlier step was not finite
  bool stops() const { return strategy.over(position.step); }
  void end_training();  // of the epoch, on all ranks
  void evaluate();      // stops the run if a signal interrupts it
  void end_epoch();
  FitReport end();
  std::string fail(std::string message);  // after an exception with this message; returns it with what callbacks add

  // ---- for callbacks ------------------------------------------------------------------------------------------------
  Module& model;
  Task task;
  Optimizer& optimizer;
  Backend& backend;
  Strategy& strategy;
  const RunConfig& options;
  const bool first_rank;  // whether this is the rank that writes files and lines
  CheckpointFiles files;
  std::unique_ptr<BatchSource> one_batch;  // with overfit_batch
  const FitData data;                      // this rank's
  Settings settings;                       // the requested settings, by the options' names
  FlatParameters flat;
  std::map<std::string, std::string> about;  // the data and the model, for exports
  std::int64_t classes = 0;                  // 0: unknown
  std::int64_t global_batch = 0;             // pictures of all ranks
  int batch_growth = 1;                      // how many times larger the batch is than on one machine
  std::unique_ptr<MemoryPlan> memory_plan;   // if there is a budget
  std::optional<Ema> ema;
  std::optional<Accumulation> accumulation;
  Rates rates;

  RunPosition position;        // its epoch and batch are this rank's
  std::int64_t began = 0;      // the step at which this call began
  std::int64_t last_step = 0;  // the step after which the call ends at the latest
  std::string nothing_left;    // why there is no step to make; empty: there are steps
  Batch batch;                 // of the current step
  Variable batch_loss;         // between its forward and backward
  bool step_ends = false;      // the batch ends a step (with accumulation, other batches do not)
  bool eager = false;          // this step must not be replayed
  struct Step {                // valid if known
    bool known = false;
    double loss = 0, right = 0;  // of the last batch: mean loss, number of pictures
    double mean_loss = 0, accuracy = 0, images_per_second = 0, seconds = 0;  // since the epoch began
    double learning_rate = 0;
  } step;
  MetricSums trained;  // in the epoch, by all ranks
  EpochReport epoch;
  FitReport report;
  std::string reason = "finished";  // why the run ended
  std::string not_finite;           // why a step was not finite; empty: all were finite
  bool diverged = false;            // a step, or most gradients at the servers, were not finite
  std::vector<Measures> measures;   // of all ranks, at the end

  // Requests that all ranks stop after the next step. why: for the last lines, on this rank.
  void request_stop(const std::string& why);
  void stop(const std::string& why) {  // at once; the same on all ranks
    report.stopped = true;
    reason = why;
  }
  void warn(const std::string& text);  // to all callbacks
  RunPosition consistent_position();   // after an exception: the position that matches the parameters
  std::int64_t smallest_share() const { return global_batch / strategy.ranks().batch_shares; }  // pictures
  Training training() { return {flat, optimizer, ema ? &*ema : nullptr, &strategy}; }
  std::int64_t batches_per_epoch() const { return data.train.batches_per_epoch(); }

  std::vector<std::shared_ptr<Callback>> callbacks;

 private:
  FlatMemory prepare();
  void resume();
  void plan_memory();
  void phase(const char* name, bool begins);
  void read_step();
  void check_finite();
  [[noreturn]] void give_up(const std::string& elsewhere, std::int64_t back);
  void locate(RunPosition& p) const;  // sets epoch and batch from the step
  RunPlan plan();
  bool reads_step() const;
  void share_evaluation();

  const Restored<double> clip_norm_;
  const Restored<IfNotFinite> if_not_finite_;
  std::optional<Counters> counters_;
  EpochSums sums_;
  MetricSums resumed_;                             // of the current epoch
  MetricSums consistent_sums_;                     // after the last complete step
  std::int64_t unread_ = 0, known_steps_ = 0;      // steps since the optimizer's state was read; its count then
  std::int64_t steps_done_ = 0, first_count_ = 0;  // steps of this rank; the optimizer's count before them
  std::chrono::steady_clock::time_point epoch_began_;
  double correct_before_ = 0;
  EpochEnd ended_;  // the last epoch that ended on this rank
  bool interrupted_ = false;
  std::string asked_why_;
};

// The callbacks of fit(), which do its work besides training, in the order in which they are called. Run::begin()
// makes them; those with a Run may throw UsageError.
std::shared_ptr<Callback> stop_on_signal();   // SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGXCPU
std::shared_ptr<Callback> profile(Run& run);  // RunConfig::profiler
std::shared_ptr<Callback> write_metrics(Run& run);
std::shared_ptr<Callback> write_exports(Run& run);  // RunConfig::import_export
std::shared_ptr<Callback> show_progress(Run& run);
std::shared_ptr<Callback> warn_of_doubts();
std::shared_ptr<Callback> stop_early();  // RunConfig::patience; finds the best epoch in any case
std::shared_ptr<Callback> save_checkpoints(Run& run);
std::shared_ptr<Callback> overfit_batch();
std::unique_ptr<BatchSource> first_batch_of(BatchSource& source);  // repeats it, 300 times an epoch

bool asked_to_stop();  // whether a signal asked fit() to stop; may be called from any thread

}  // namespace tandem
