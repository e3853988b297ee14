// Strategy: the one seam between a single machine and many. The base class is training on one machine; synchronous
// all-reduce, the parameter server and the rest are one file each in dist/ and override what differs.
//
// The order of calls in fit():
//   batches(train, …)           which of them this rank trains
//   prepare(model, loss)        may replace layers and the loss
//   sync_batch_norm(model)      where it is asked for
//   memory()                    where the parameter vectors live
//   begin(space)                broadcast the first weights, hook the gradients
//   bind(optimizer)             after the optimizer has its state
//   follow(course)              after a run that is resumed was loaded
//   begin_epoch(epoch)
//   per batch: forward, loss, backward (hooks only enqueue), step(optimizer, loss)
//   end_epoch(epoch), end()     after each every rank holds the same weights
// Parameters change only inside step(). Between begin() and end() the backend must not go away.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/batch.h"
#include "layers/optim/optimizer.h"

namespace tandem {

// logits, labels (i32) → a scalar; correct (i32 [1], may be null) is incremented by the rows that were right.
using Loss = std::function<Variable(const Variable& logits, const Tensor& labels, Tensor* correct)>;
Loss cross_entropy_loss(double label_smoothing = 0);

// Sums over a rank's share of an evaluation; added up over ranks.
struct Score {
  double loss = 0;  // sum over samples
  double correct = 0, samples = 0;
  friend Score operator+(const Score& a, const Score& b) {
    return {a.loss + b.loss, a.correct + b.correct, a.samples + b.samples};
  }
};

// What a run is to be. Strategies whose ranks are apart count its steps and set its learning rate themselves.
struct Course {
  std::int64_t epochs = 1, stop_after = 0;     // steps; 0: none
  std::int64_t done = 0;                       // steps of the run that is resumed
  double steps_per_epoch = 1;                  // of all ranks
  std::function<double(double step)> learning_rate = {};  // any thread
  std::function<Score()> so_far = {};          // what this rank has trained since the last start() of its batches
  std::function<bool()> asked_to_stop = {};    // by a signal
  bool resumed = false;                        // the optimizer remembers steps
};

class Strategy {
 public:
  virtual ~Strategy() = default;
  virtual std::string name() const { return "one machine"; }
  virtual int rank() const { return 0; }
  virtual int size() const { return 1; }
  virtual std::string where() const { return "this machine"; }  // "rank 2 on node7"

  // Ranks are at different places of the run: nobody waits at the end of an epoch, and rank 0 alone evaluates, for all.
  virtual bool apart() const { return false; }
  // What this rank trains of `train`, `accumulate` batches to a step; lives as long as the strategy.
  virtual BatchSource& batches(BatchSource& train, int accumulate) {
    (void)accumulate;
    train.share(rank(), size());
    return train;
  }
  // Ranks whose gradients, each of its share of a batch, make one step. Otherwise a step is one rank's own.
  virtual int ranks_to_a_step() const { return 1; }
  bool asynchronous() const { return apart() && ranks_to_a_step() == 1; }  // every rank's gradient is a step for all
  virtual void follow(const Course& course) { (void)course; }         // before the first start() of the batches
  virtual std::int64_t steps(std::int64_t mine) const { return mine; }  // of all ranks, when this one has made so many
  // Epochs that are behind this rank, which was in this one: apart, others may have trained all of several.
  virtual std::int64_t epochs_behind(std::int64_t epoch) const { return epoch + 1; }
  virtual void collect(Optimizer& optimizer) { (void)optimizer; }     // at rank 0: what it remembers, from where that is

  virtual void prepare(Module& model, Loss& loss) { (void)model, (void)loss; }
  // The batch norms of the model take their statistics over the pictures of all ranks, between begin() and end(): all ranks
  // must run the model together, in forward and backward.
  virtual void sync_batch_norm(Module& model) { (void)model; }
  // While it is on, this rank runs the model by itself, and nothing of that is exchanged.
  virtual void by_itself(bool on) { (void)on; }
  virtual SpaceMemory memory() { return {}; }
  virtual void begin(ParameterSpace& space) { (void)space; }
  virtual void bind(Optimizer& optimizer) { (void)optimizer; }
  // Everything between backward() and the next forward. A loss or gradient that is not finite on any rank leaves all
  // parameters as they are, on every rank; what follows is optimizer.if_not_finite's to say.
  virtual StepResult step(Optimizer& optimizer, const Variable& loss) { return optimizer.step(&loss.value()); }

  // On a device, a step() that can be replayed is three: the first and the last only queue work, so that each may be recorded;
  // between them the host exchanges, and waits with a deadline until all has arrived.
  virtual bool in_parts() const { return false; }  // once it has begun
  virtual void hand_over(const Tensor& loss) { (void)loss; }
  virtual void exchange() {}
  virtual void update(Optimizer& optimizer) { (void)optimizer; }

  // After a step or an epoch: do all ranks, now, give a step up whose loss or gradient was not finite? `state`: this
  // rank's optimizer's. If it was so on another rank only, the second says on which.
  virtual bool gives_up(const StepState& state) const { return state.not_finite == 1; }
  virtual std::string not_finite_on() const { return ""; }

  virtual void begin_epoch(int epoch) { (void)epoch; }
  virtual void end_epoch(int epoch) { (void)epoch; }
  virtual void end() {}

  // Running statistics as evaluation and checkpoints should see them; scores over all ranks.
  virtual void merge_statistics(ParameterSpace& space) { (void)space; }
  // While the space holds averages over steps (EMA) instead of weights: those over all ranks' steps, on every rank.
  virtual void merge_averages(ParameterSpace& space) { (void)space; }
  virtual Score combine(const Score& mine) { return mine; }
  // What was trained in an epoch, of which this rank trained `mine`; apart: by all since the last call, at rank 0.
  virtual Score trained(const Score& mine) { return combine(mine); }

  // A request to stop (SIGTERM, early stop) rides on the next step, so that all ranks stop at the same one.
  virtual void request_stop() { stop_ = true; }
  virtual bool stopped() const { return stop_; }

  // After one of these calls threw since another rank is lost: shall this one write what is left of the run? Takes seconds, in
  // which the ranks that are left look for each other.
  virtual bool saves_after_failure() { return false; }

  // Every rank's text, in the order of ranks. All ranks call it.
  virtual std::vector<std::string> gather(const std::string& mine) { return {mine}; }
  // From now on its exchanges are spans of this trace. All ranks call it; what comes back brings this trace's times to rank 0's.
  struct ClockOffset {
    std::int64_t ns = 0, error_ns = 0;  // to be added; how far it may be off
  };
  virtual ClockOffset watch(Trace& trace) { return (void)trace, ClockOffset{}; }

  // What it measured on this rank so far, by name: for the last line of the metrics.
  virtual std::vector<std::pair<std::string, double>> measures() const { return {}; }

 protected:
  bool stop_ = false;
};

// How the program was started decides: one process → Strategy; ranks in the environment → a distributed one. Defined in
// dist/, or in dist/job/none.cpp where there is no network library: then a distributed start is refused, never run as copies.
std::unique_ptr<Strategy> strategy_from_environment();
// Which of all ranks this process is, and which of the ranks on this host, and of how many; 0, 0 and 1 where the launcher does
// not say. Defined in dist/ in any case.
int rank_from_environment();
int local_rank_from_environment();
int local_size_from_environment();

}  // namespace tandem
