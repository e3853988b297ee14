// Training in rounds: ranks, or hosts whose ranks step together, make several steps between two exchanges of weights.
// A RoundMethod is a schedule and a merge:
//
//   when      next() decides after each step whether a sum of weights over the ranks begins
//   what      the whole vector, or one of F fragments in turn
//   how late  the step waits for the sum, or training continues and a later turn uses it
//   merge     the data that a rank sends of its weights x, and how it uses the sum
//
// local_steps.h and daso.h have the methods by name; examples/own_strategy.cpp is one of a user's own.
//
// Every rank has the whole model and a share of every batch. It steps by the gradient of its share alone, or by
// all-reduce inside its host. Velocities and moments stay local, so any optimizer can be used. A picture has the same
// weight on all ranks, also in a last batch with unequal shares. The learning rate is not scaled by the number of
// ranks, since a step uses the batch of one rank or host, for which the rate was chosen.
//
// At the end of an epoch all ranks hold the same weights, and running statistics are merged as under all-reduce. Stop
// requests and non-finite losses are sent with the sums, so all ranks receive them after the same step. When a rank is
// lost, the rank that writes the checkpoint writes its own weights. A resumed run begins, on all ranks, with rank 0's
// optimizer state.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "dist/collectives/communicator.h"
#include "layers/train/strategy.h"

namespace tandem {

class SlicedClassifier;

// The exchange after a step.
struct Turn {
  bool sends = false;                        // a sum begins
  bool waits = false;                        // the step waits for it
  bool merges = false;                       // the sum in flight, if there is one, is used now
  bool merges_first = true;                  // before the new one is sent
  bool again = false;                        // returned by RoundMethod::end(): a further turn follows
  std::int64_t weight = 0;                   // for the merge: the steps that the sum has waited
  std::int64_t fragment = 0, fragments = 1;  // what is sent
};

struct Moment {
  std::int64_t step = 0;              // steps of the run before this one
  std::int64_t batch = 0, last = -1;  // of the epoch; last = −1: unknown
  double rate = 0;                    // the learning rate
};

// One range of the vector in an exchange; f32, or f64 on the reference backend.
struct Exchanged {
  Range range = {};
  Tensor x;          // the weights now
  Tensor sent = {};  // the weights as they were sent; x itself if the step waits
  Tensor sum;        // what send() wrote, then its sum over `ranks` ranks
  int ranks = 1;
  Turn turn = {};  // the one that sent it, with the weight of the one that uses it
};

class RoundMethod {
 public:
  virtual ~RoundMethod() = default;

  // ---- schedule: a function of steps, rates and training losses, the same on all ranks ------------------------------
  virtual void begin_epoch(std::int64_t epoch, const RunPlan& plan) { (void)epoch, (void)plan; }
  virtual Turn next(const Moment& now) = 0;  // after a step
  // At the end of an epoch, unless all ranks have the same weights: afterwards they have.
  virtual Turn end(const Moment& now) { return (void)now, Turn{.sends = true, .waits = true, .merges = true}; }
  virtual void end_epoch(double loss) { (void)loss; }

  // ---- for workers with parts; own: null if all workers use all pictures --------------------------------------------
  virtual void join(const OwnPart* own, const Optimizer& optimizer) { (void)own, (void)optimizer; }  // called first
  virtual void before_update(const Tensor& x, Tensor& gradients) { (void)x, (void)gradients; }
  virtual void after_update(Tensor& x, double rate) { (void)x, (void)rate; }
  virtual void go_back(Tensor& x) { (void)x; }  // to the weights before this round, since a rank is lost

  // ---- merge: element-wise, of one range ----------------------------------------------------------------------------
  // Writes what is summed; may replace `sum` by another tensor.
  virtual void send(Exchanged& e) { e.sum.copy_from(e.x); }
  virtual void merge(Exchanged& e);  // x = mean of the sent weights + (x − what this rank sent)

  // ---- its vectors --------------------------------------------------------------------------------------------------
  virtual void allocate(const FlatParameters& flat) { (void)flat; }
  virtual void release() {}                         // before the memory of the device is gone
  virtual void start(const Tensor& x) { (void)x; }  // the whole vector, before the first step
  // All ranks have these weights: an epoch begins, or a step has waited for a sum of the whole vector.
  virtual void equal(const Tensor& x) { (void)x; }
  virtual Tensor* centre() { return nullptr; }       // evaluated and saved instead of x
  virtual bool acts_alone() const { return false; }  // also with one rank
  virtual void saved(StrategyState& state) { (void)state; }
};

struct RoundRanks {
  std::unique_ptr<Communicator> everybody;
  // Set if the ranks of a host step together. gradients, host: the ranks of this host (a separate thread uses
  // `gradients`). across: those with this rank's local index, one of each host; the groups of a local index take turns
  // to sum weights over the hosts.
  std::unique_ptr<Communicator> gradients = nullptr, host = nullptr, across = nullptr;
};

struct RoundsOptions {
  std::int64_t bucket_bytes = 0;                           // 0: an eighth of the vector, between 256 KiB and 4 MiB
  double deadline = 300;                                   // maximum seconds for any operation of a device
  bool merges_statistics = true;                           // running statistics are averaged after each epoch
  std::shared_ptr<SlicedClassifier> classifier = nullptr;  // divided over the ranks of a host (hybrid.h)
  // Above 0: a round is this number of epochs over a worker's own part, and `sample` is the share of the workers in it.
  std::int64_t own_epochs = 0;
  double sample = 1;
};

// Prints a note if `planned` epochs are not a multiple of own_epochs: the last round is then trained to its end.
void note_whole_rounds(const std::string& name, std::int64_t own_epochs, int planned);

// make: called by begin(). end() releases the method's vectors. Throws CommunicationError from begin() and at
// exchanges if another rank fails, and Error if the ranks have different models.
std::unique_ptr<Strategy> rounds(RoundRanks ranks, const std::string& name,
                                 std::function<std::unique_ptr<RoundMethod>()> make, const RoundsOptions& options = {});

// The same for a method by its options: RoundSteps, Federated or DasoOptions.
template <class How>
std::unique_ptr<Strategy> rounds(RoundRanks ranks, const How& how, RoundsOptions options = {}) {
  how.adjust(options);
  return rounds(
      std::move(ranks), how.name(), [how] { return how.method(); }, options);
}

}  // namespace tandem
