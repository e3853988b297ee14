// Strategies under which ranks make several local steps between two exchanges. Every rank has the whole model and a
// share of every batch, as with all-reduce, but makes its steps with the gradient of its share alone. Once in H steps
// the weights x are exchanged. Such a strategy consists of a schedule and a merge:
//
//   when      every H steps; an increasing H (Interval); 1 until the learning rate first decays (post-local-sgd)
//   what      the whole vector, or one of `stream` fragments in turn, at f·H/stream
//   how late  the step waits for the sum (overlap 0), or training continues and the sum is used `overlap` steps later
//   merge     the data that a rank sends of x, and how it uses the sum over all ranks (RoundMerge)
//
//   local-sgd       x = mean (Stich 2018)
//   post-local-sgd  the same, with H = 1 until the learning rate first decays: until it falls by a tenth from one step
//                   to the next, or to half of its largest; if it never does, for half of the run (Lin et al. 2018)
//   cocod-sgd       the sum is used at the next exchange: x = mean of the sent weights + (x − what this rank sent)
//                   (Shen et al. 2019)
//   easgd           each rank is pulled to a centre z, and the centre to all ranks: x −= α(x − z), z += Σα(x − z),
//                   α = 0.9/ranks. The sum is used at the next exchange, where z is needed. The centre is evaluated,
//                   saved, and the result of training; ranks continue from their own weights. (Zhang, Choromanska
//                   and LeCun 2015, the synchronous form; the simulator has the asynchronous one.)
//   outer           the change by H steps of all ranks is a gradient for SGD with Nesterov's momentum, whose state
//                   is m (DiLoCo, Douillard et al. 2023):
//                   Δ = θ − mean;  m = β·m + Δ;  θ = θ − γ(Δ + β·m);  x = θ
//                   With β = 0 and γ = 1 it is local-sgd, to the bit. With stream=F a sum is used at the next
//                   fragment's turn or `overlap` steps later, and x = θ + (x − what was sent) (Streaming DiLoCo, 2025).
//
// Velocities and moments of the inner optimizer stay on the rank, so any optimizer can be used. With SGD, local-sgd:1
// equals all-reduce, since the mean of velocities is the velocity of the mean. A picture has the same weight on all
// ranks, also in a last batch with unequal shares. The learning rate is not scaled by the number of ranks, since a step
// uses the batch of one rank, for which the rate was chosen.
//
// At the end of an epoch all ranks hold the same weights, and running statistics are merged as under all-reduce. With
// outer this is a step of the whole vector, even after a short last round. So H should divide the steps of an epoch, or
// be much smaller. Stop requests and non-finite losses are sent with the exchanges, so all ranks receive them after the
// same step. If sums overlap with steps, they receive them one exchange later. When a rank is lost, the rank that
// writes the checkpoint writes its own weights. A resumed run begins, on all ranks, with rank 0's optimizer state. The
// checkpoint contains m of outer.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "dist/collectives/communicator.h"
#include "dist/collectives/nccl.h"
#include "layers/train/strategy.h"

namespace tandem {

// The number of steps between two exchanges: constant, or increasing as the learning rate η decays, by the quadratic
// synchronization rule (Gu et al., ICLR 2024): max(steps, ⌊(α/η)²⌋). While the rate rises, η is the rate that it will
// reach, so that a warm-up does not begin with few exchanges.
struct Interval {
  std::int64_t steps = 8;
  double alpha = 0;  // 0: always `steps`

  // "100"; "qsr:0.2": at least `steps`; "qsr:0.2:4": at least 4. Returns nothing if `text` has none of these forms.
  static std::optional<Interval> parse(const std::string& text, std::int64_t steps);
  std::string name() const;  // "100", "qsr:0.2:4"
  // For the round that begins with this step and rate.
  std::int64_t at(double rate, std::int64_t step, const RunPlan& plan) const;
};

struct RoundSteps {
  enum class Kind { local, post_local, cocod, elastic, outer } kind = Kind::local;
  static constexpr std::int64_t until_next_turn = -1;
  Interval every = {};
  // β and γ of outer. The paper's β of 0.9 is for hundreds of rounds; 0.5 is our choice for the tens of a short run.
  double momentum = 0.5, learning_rate = 0.7;
  std::int64_t stream = 1;   // fragments
  std::int64_t overlap = 0;  // steps between sending and using a sum; 0: the step waits

  // "local-sgd:8", "cocod-sgd", "local-sgd:H=qsr:0.2:4", "outer:H=100,momentum=0.5,lr=0.7,stream=4,overlap=5". The
  // default of H is 8, and 100 for outer. `outer` has the defaults of that name. Returns nothing if the name has none
  // of these forms. Throws UsageError.
  static std::optional<RoundSteps> parse(const std::string& text, const RoundSteps& outer);
  static std::optional<RoundSteps> parse(const std::string& text) {
    return parse(text, {.kind = Kind::outer, .every = {.steps = 100}});
  }
  std::string name() const;  // "local-sgd:8"
};

// Defines the data that a rank sends, and how it uses the sum over all ranks. All tensors except those of begin() are
// one range of the vector, f32, or f64 on the reference backend.
class RoundMerge {
 public:
  virtual ~RoundMerge() = default;
  virtual void begin(const FlatParameters& flat) { (void)flat; }  // allocates its state
  virtual void start(const Tensor& x) { (void)x; }                // the whole vector, before the first step
  virtual void send(Range range, Tensor& x, Tensor& sum);         // sum = x
  // sent: x as it was sent; x itself if the step waits for the sum. sum: over `ranks` ranks.
  virtual void merge(Range range, Tensor& x, Tensor& sent, Tensor& sum, int ranks) = 0;
  virtual Tensor* centre() { return nullptr; }  // evaluated and saved instead of x
  virtual void saved(StrategyState& state) { (void)state; }
  virtual bool acts_alone() const { return false; }  // merge even with one rank
};
std::unique_ptr<RoundMerge> make_merge(const RoundSteps& how, int ranks);

struct RoundsOptions {
  std::int64_t bucket_bytes = 0;      // 0: an eighth of the vector, between 256 KiB and 4 MiB
  double deadline = 300;              // maximum seconds for any operation of a device
  const NcclLibrary* nccl = nullptr;  // null: the installed one
};

// Throws CommunicationError from begin() and at exchanges if another rank fails, and Error if the ranks have different
// models.
std::unique_ptr<Strategy> rounds(std::unique_ptr<Communicator> communicator, const RoundSteps& how,
                                 const RoundsOptions& options = {});

}  // namespace tandem
