// Strategy: the one interface between training on a single machine and on many. The base class is one machine;
// synchronous all-reduce, the parameter server and the others are one file each in dist/strategies/ and override the
// methods that differ.
//
// The plan determines the batches that this rank trains on and the progress of the run. The exchange combines the
// results of the ranks. The order of calls in fit():
//   batches(train, accumulate)
//   prepare(model, task, options)
//   memory()                           for the parameter vectors
//   begin(flat, optimizer)             the optimizer is bound
//   watch(trace)                       if a trace was requested
//   per epoch:
//     begin_epoch(epoch, run)
//     per step: forward, loss, backward (gradient hooks may only enqueue work), then exchange, update, finish
//     end_epoch(…), synchronize(…)     afterwards all ranks hold the same weights
//   end()
// Parameters never change between the forward pass and exchange(); most strategies change them in update(), finish()
// and end_epoch(), the parameter server in exchange(), which pulls them.
// The backend must exist from begin() to end().
// All ranks make the same calls in the same order, unless a method says otherwise. Methods throw CommunicationError
// when another rank is lost.
#pragma once
#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/batch.h"
#include "layers/optim/optimizer.h"
#include "layers/train/own_part.h"
#include "layers/train/task.h"

namespace tandem {

// Sums over a rank's samples, in training or evaluation; added up over ranks.
struct MetricSums {
  double loss = 0;  // sum over samples
  double correct = 0, samples = 0;
  double interrupted = 0;            // ranks that stopped an evaluation early
  std::vector<double> classes = {};  // of an evaluation: correct samples and samples of class 0, of class 1, …
};

// The plan of a run, equal in all its epochs.
struct RunPlan {
  std::int64_t epochs = 1, stop_after = 0;                // stop_after: in steps of the run; 0: never
  std::int64_t done = 0;                                  // steps of the run that is resumed
  double steps_per_epoch = 1;                             // of the run
  std::function<double(double step)> learning_rate = {};  // called from any thread
  std::function<MetricSums()> running_sums = {};          // of this rank in the epoch, this step included
  std::function<bool()> asked_to_stop = {};               // by a signal; called from any thread
  bool resumed = false;                                   // the optimizer's state is from a checkpoint
};

struct EpochEnd {
  std::int64_t epochs = 0;  // finished epochs of the run
  std::int64_t steps = 0;   // of the run, at the end of these epochs
  MetricSums trained = {};  // of this epoch, or since the last call if ranks are in different epochs
  double seconds = 0;       // of this training
};

using Measures = std::vector<std::pair<std::string, double>>;

// The state of a strategy in a checkpoint, by name. Values that the file lacks do not change.
struct StrategyState {
  std::map<std::string, std::string> texts;  // rank 0's
  std::map<std::string, Tensor> vectors;     // as long as the parameters, and the same on all ranks

  // value: the present value; when a file is read, it is set to the file's value.
  void text(const std::string& name, std::string& value) { value = texts.try_emplace(name, value).first->second; }
  // When a file is read, values is overwritten in place.
  void vector(const std::string& name, const Tensor& values) { vectors.emplace(name, values); }
};

// The number of this rank, and how the ranks share the work. Fixed when the strategy is made.
struct Ranks {
  std::string strategy = "one machine";  // its name
  int rank = 0, size = 1;
  std::string where = "this machine";  // "rank 2 on node7"
  int batch_shares = 1;                // ranks among which a batch is divided
  int per_step = 1;                    // ranks whose gradients make one step together
  bool synchronous = true;             // all ranks make the same steps
  int evaluation_shares = 1;           // ranks among which an evaluation is divided: they evaluate and save together
  int evaluation_share = 0;            // this rank's share
  bool evaluates = true;               // this rank evaluates; otherwise it gets the result at the end
};

class Strategy {
 public:
  explicit Strategy(Ranks ranks = {}) : ranks_(std::move(ranks)) {}
  virtual ~Strategy() = default;
  const Ranks& ranks() const { return ranks_; }
  const std::string& name() const { return ranks_.strategy; }
  int rank() const { return ranks_.rank; }
  int size() const { return ranks_.size; }
  const std::string& where() const { return ranks_.where; }

  // ---- plan ---------------------------------------------------------------------------------------------------------
  // The part of `train` that this rank trains on, with `accumulate` batches per step. Valid as long as the strategy.
  // By default a share of every batch. If each worker has its own part of the pictures: weighted batches of that part.
  virtual BatchSource& batches(BatchSource& train, int accumulate);
  // Called before the first batch of every epoch. run.done: the steps made before this start of the program.
  virtual void begin_epoch(std::int64_t epoch, const RunPlan& run) { (void)epoch, plan_ = run; }
  // Number of steps of the run so far. known: the number that this rank has counted.
  virtual std::int64_t steps(std::int64_t known) const { return known; }
  // Called after the last batch of epoch mine.epochs − 1, with the results of this rank.
  virtual EpochEnd end_epoch(const EpochEnd& mine) {
    return {mine.epochs, mine.steps, sum(mine.trained), mine.seconds};
  }
  // Whether this rank has trained its last batch, after `step` steps of the run. All ranks stop at the same step.
  virtual bool over(std::int64_t step) const {
    const bool asked = stop_ || (size() == 1 && stop_requested_);
    return asked || (plan_.stop_after > 0 && step >= plan_.stop_after);
  }
  // May be called on any rank. A strategy for several ranks sends the request to all ranks in an exchange, and then
  // sets stop_ on all of them.
  void request_stop() { stop_requested_ = true; }
  // The texts of all ranks, or of those that evaluate and save together, in the order of ranks.
  enum class Among { all, evaluating };
  virtual std::vector<std::string> gather(const std::string& mine, Among = Among::all) { return {mine}; }
  MetricSums sum(const MetricSums& mine, Among among = Among::all);
  // Whether this rank must save the remaining state of the run, after a call failed because another rank is lost. Takes
  // seconds, in which the remaining ranks find each other.
  virtual bool saves_after_failure() { return false; }

  // ---- exchange -----------------------------------------------------------------------------------------------------
  struct PrepareOptions {
    bool sync_batch_norm = false;  // statistics over the pictures of all ranks, between begin() and end()
  };
  // May replace layers and the task's losses. By default refuses statistics over the pictures of several ranks.
  virtual void prepare(Module& model, Task& task, const PrepareOptions& options);
  // The memory for the parameter vectors; empty: any memory.
  virtual FlatMemory memory() { return {}; }
  // Gives all ranks the weights of rank 0.
  virtual void begin(FlatParameters&, Optimizer&) {}
  // All work between backward() and the next forward(), for a loop that is not recorded. If a loss or gradient is not
  // finite on any rank, the parameters of all ranks do not change; optimizer.if_not_finite selects the reaction.
  StepResult step(Optimizer& optimizer, const Variable& loss) {
    require(optimizer.flat().gradients_complete(), "step() before backward(): there are no gradients");
    if (emulation) emulation(true);
    exchange(loss.value());
    update(optimizer, loss.value());
    const StepResult result = optimizer.result();
    finish(optimizer);
    if (emulation) emulation(false);
    return result;
  }
  // The three parts of a step. With several ranks the first and the last run on the host in every step, and may wait
  // for other ranks. update() only queues work on the device, so that it can be recorded and replayed; on one machine
  // the same holds for exchange(). loss: mean over this rank's samples.
  virtual void exchange(const Tensor&) {}
  virtual void update(Optimizer& optimizer, const Tensor& loss) { optimizer.update(&loss); }
  virtual void finish(Optimizer&) {}
  // If set, emulates a rank of another speed (--pace) by sleeping: called with true when a step has computed its
  // gradients, and with false when the step is over.
  std::function<void(bool computed)> emulation;
  // Called after a step or an epoch. If this rank must stop because a loss or gradient was not finite, returns the rank
  // where it was not finite ("" for this one), otherwise nothing. `state`: of this rank's optimizer.
  virtual std::optional<std::string> not_finite(const StepState& state) const {
    return state.not_finite == 1 ? std::optional<std::string>("") : std::nullopt;
  }
  // Makes data equal that differs between ranks, for evaluation and checkpoints.
  enum class Shared {
    buffers,   // running statistics of the model, on all ranks
    averages,  // averages of weights over steps (EMA), while the flat parameters contain them, on all ranks
    optimizer  // the optimizer's state, on rank 0. Only rank 0 calls it
  };
  virtual void synchronize(Shared, FlatParameters&, Optimizer&) {}
  // Passes to `state` the data of this strategy that a checkpoint stores. Called between begin() and end(): when a
  // checkpoint is written, at the end of an epoch or of the run, and when one is read, before the first step.
  virtual void saved(StrategyState&) {}
  // Ends the exchange; returns the measurements on this rank, by name. May be called again.
  virtual Measures end() { return {}; }
  // From now on exchanges are spans of this trace. Returns the offset that converts this rank's trace times to rank
  // 0's.
  struct ClockOffset {
    std::int64_t ns = 0, error_ns = 0;  // the number to add; its largest error
  };
  virtual ClockOffset watch(Trace&) { return {}; }

 protected:
  // This worker's part, kept in own_part_; null: all workers draw from all pictures.
  OwnPart* own_part(BatchSource& train, int accumulate, const OwnPartOptions& options);

  std::unique_ptr<OwnPart> own_part_;
  Ranks ranks_;
  RunPlan plan_;
  std::atomic<bool> stop_requested_ = false;
  bool stop_ = false;  // set on all ranks
};

// The value of every rank, in the order of ranks; T{} for a lost rank. All ranks call it (Strategy::gather).
template <class T>
std::vector<T> gathered(Strategy& strategy, const T& mine, Strategy::Among among = Strategy::Among::all) {
  static_assert(std::is_trivially_copyable_v<T>);
  std::vector<T> all;
  for (const std::string& bytes : strategy.gather({reinterpret_cast<const char*>(&mine), sizeof mine}, among)) {
    all.emplace_back();
    if (bytes.size() == sizeof(T)) std::memcpy(&all.back(), bytes.data(), sizeof(T));
  }
  return all;
}

// Files contain whole parameters for any number of ranks with slices. To write a file, the slices are gathered; when a
// file is read, each rank reads its rows.
//
// The whole tensor of this shape, in host memory, of which this rank has the slice `mine`; a slice of count 1 is
// returned as it is. All ranks call it, in the same order. Ranks with wanted = false get an undefined tensor,
// and need memory for 4 MiB of each slice at a time. Throws Error when a slice is on no rank, or without a strategy.
Tensor gather_slices(const Tensor& mine, const Slice& slice, const Shape& whole, Strategy* strategy, bool wanted);
// After training: every rank gets the whole of each divided parameter, so that the model can be used and exported like
// a model of a single machine. Flat parameters that were built before no longer belong to the model. All ranks call it.
void make_whole(Module& model, Strategy& strategy);

// strategy_from_environment() chooses by the way the program was started: one process → Strategy; ranks in the
// environment → a distributed one. Defined in dist/, or in dist/job/none.cpp without a network library: then a
// distributed start is refused, and never runs as independent copies. own: strategies of the program, for
// `tandem-run --strategy NAME`.
//
// A StrategyMaker is called after the name was found to be valid; the ranks connect in it.
using StrategyMaker = std::function<std::unique_ptr<Strategy>()>;
struct NamedStrategy {
  std::string form;  // for the list in an error message: "pairs:STEPS"
  // Returns null if `name` is of another strategy. Throws UsageError for wrong arguments.
  std::function<StrategyMaker(const std::string& name)> parse;
};
std::unique_ptr<Strategy> strategy_from_environment(const std::vector<NamedStrategy>& own = {});
// The rank of this process, its rank on this host, and the number of ranks on this host; 0, 0 and 1 if the launcher
// does not set them. Always defined in dist/.
int rank_from_environment();
int local_rank_from_environment();
int local_size_from_environment();

}  // namespace tandem
