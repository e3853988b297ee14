// Ranks that make several steps of their own between two exchanges. Every rank has the whole model and a share of every
// batch, as under all-reduce, but steps by the gradient of its share alone. Once in H steps, weights x are exchanged.
// A strategy of this kind is a schedule and a merge:
//
//   when      H steps; or more and more of them (Interval); one until the learning rate first decays (post-local-sgd)
//   what      the whole vector, or one of `stream` fragments in turn, at f·H/stream
//   how late  the step waits for the sum (overlap 0), or training goes on and the sum is used `overlap` steps later
//   merge     what a rank sends of x, and what it makes of the sum over all ranks (RoundMerge)
//
//   local-sgd       x = mean (Stich 2018)
//   post-local-sgd  the same, with H = 1 until the learning rate first decays: until it falls by a tenth from one step
//                   to the next, or to half of its largest; where it never does, for half of the run (Lin et al. 2018)
//   cocod-sgd       the sum is used at the next exchange: x = mean of what was sent + (x − what this rank sent)
//                   (Shen et al. 2019)
//   easgd           each rank is drawn to a centre z, and the centre to all of them: x −= α(x − z), z += Σα(x − z),
//                   α = 0.9/ranks. The sum is used at the next exchange, which is when z is needed. What is evaluated,
//                   saved, and left at the end is the centre; ranks go on from their own weights. (Zhang, Choromanska
//                   and LeCun 2015, the synchronous form; the simulator has the asynchronous one.)
//   outer           what H steps of all ranks have changed is a gradient for SGD with Nesterov's momentum, whose state
//                   is m (DiLoCo, Douillard et al. 2023):
//                   Δ = θ − mean;  m = β·m + Δ;  θ = θ − γ(Δ + β·m);  x = θ
//                   With β = 0 and γ = 1 it is local-sgd, to the bit. With stream=F a sum is used at the next
//                   fragment's turn or `overlap` steps later, and x = θ + (x − what was sent) (Streaming DiLoCo, 2025).
//
// Velocities and moments of the inner optimizer stay with the rank, so any optimizer will do. With SGD local-sgd:1 is
// all-reduce, since the mean of velocities is the velocity of the mean. A picture weighs the same on all ranks, also in
// a last batch of which they have shares that differ. The learning rate is not scaled by the number of ranks, since a
// step is made on the batch of one rank, for which it was chosen.
//
// At the end of an epoch all ranks hold the same weights, and running statistics are merged as under all-reduce. Under
// outer that is a step of the whole vector, however few steps the last round has: let H divide the steps of an epoch,
// or be far below them. Requests to stop and losses that are not finite travel with the exchanges, so all ranks know of
// them after the same step; where sums overlap with steps, that is one exchange later. When a rank is lost, the one
// that writes the checkpoint writes its own weights. A run that is resumed begins, on all ranks, with the optimizer's
// state of rank 0; m of outer is in the checkpoint.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "dist/collectives/communicator.h"
#include "dist/collectives/nccl.h"
#include "layers/train/strategy.h"

namespace tandem {

// How many steps lie between two exchanges: a number, or more and more of them as the learning rate η decays, by the
// quadratic synchronization rule (Gu et al., ICLR 2024): max(steps, ⌊(α/η)²⌋). Where the rate rises, η is the one that
// it rises to, so that a warm-up does not begin with few exchanges.
struct Interval {
  std::int64_t steps = 8;
  double alpha = 0;  // 0: always `steps`

  // "100"; "qsr:0.2": at least `steps`; "qsr:0.2:4": at least 4. Nothing where `text` is none of these.
  static std::optional<Interval> parse(const std::string& text, std::int64_t steps);
  std::string name() const;  // "100", "qsr:0.2:4"
  // Of the round that begins with this step, at its rate.
  std::int64_t at(double rate, std::int64_t step, const RunPlan& plan) const;
};

struct RoundSteps {
  enum class Kind { local, post_local, cocod, elastic, outer } kind = Kind::local;
  static constexpr std::int64_t until_next_turn = -1;
  Interval every = {};
  // β and γ of outer. The paper's β of 0.9 is for hundreds of rounds; 0.5 is our choice, for the tens of a short run.
  double momentum = 0.5, learning_rate = 0.7;
  std::int64_t stream = 1;   // fragments
  std::int64_t overlap = 0;  // steps between sending and using a sum; 0: the step waits

  // "local-sgd:8", "cocod-sgd", "local-sgd:H=qsr:0.2:4", "outer:H=100,momentum=0.5,lr=0.7,stream=4,overlap=5". H is 8
  // where it is not given, 100 of outer. `outer` has that name's defaults. Nothing where the name is none of these.
  // Throws UsageError.
  static std::optional<RoundSteps> parse(const std::string& text, const RoundSteps& outer);
  static std::optional<RoundSteps> parse(const std::string& text) {
    return parse(text, {.kind = Kind::outer, .every = {.steps = 100}});
  }
  std::string name() const;  // "local-sgd:8"
};

// What a rank sends of its weights, and what it makes of the sum over all ranks. All tensors but those of begin() are
// one range of the vector, f32, or f64 on the reference backend.
class RoundMerge {
 public:
  virtual ~RoundMerge() = default;
  virtual void begin(const FlatParameters& flat) { (void)flat; }  // makes what it keeps
  virtual void start(const Tensor& x) { (void)x; }                // the whole vector, before the first step
  virtual void send(Range range, Tensor& x, Tensor& sum);         // sum = x
  // sent: x as it was sent; where the step waits for the sum, x itself. sum: over so many ranks.
  virtual void merge(Range range, Tensor& x, Tensor& sent, Tensor& sum, int ranks) = 0;
  virtual Tensor* centre() { return nullptr; }  // evaluated and saved instead of x
  virtual void saved(StrategyState& state) { (void)state; }
  virtual bool acts_alone() const { return false; }  // also with one rank
};
std::unique_ptr<RoundMerge> make_merge(const RoundSteps& how, int ranks);

struct RoundsOptions {
  std::int64_t bucket_bytes = 0;      // 0: an eighth of the vector, between 256 KiB and 4 MiB
  double deadline = 300;              // seconds that a device may need for anything
  const NcclLibrary* nccl = nullptr;  // null: the installed one
};

// Throws CommunicationError from begin() and at exchanges when another rank fails, and Error when ranks do not have the
// same model.
std::unique_ptr<Strategy> rounds(std::unique_ptr<Communicator> communicator, const RoundSteps& how,
                                 const RoundsOptions& options = {});

}  // namespace tandem
