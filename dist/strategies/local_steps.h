// Rounds (rounds.h) in which every rank makes H steps with the gradient of its own share, and then weights are summed
// over all ranks:
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
//                   With β = 0 and γ = 1 it is local-sgd, to the bit. With stream=F one of F fragments is summed in
//                   turn, at f·H/F. A sum is used at the next fragment's turn or `overlap` steps later, and
//                   x = θ + (x − what was sent) (Streaming DiLoCo, 2025).
//
// With SGD, local-sgd:1 equals all-reduce, since the mean of velocities is the velocity of the mean. With outer the
// exchange at the end of an epoch is a step of the whole vector, even after a short last round. So H should divide the
// steps of an epoch, or be much smaller. The checkpoint contains m of outer.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/spec.h"
#include "dist/strategies/rounds.h"

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
  static constexpr std::int64_t until_next_turn = -1;
  std::string kind = "local-sgd";  // a name of the table in local_steps.cpp
  Interval every = {};
  // β and γ of outer. The paper's β of 0.9 is for hundreds of rounds; 0.5 is our choice for the tens of a short run.
  double momentum = 0.5, learning_rate = 0.7;
  std::int64_t stream = 1;   // fragments
  std::int64_t overlap = 0;  // steps between sending and using a sum; 0: the step waits; or until_next_turn

  // "local-sgd:8", "cocod-sgd", "local-sgd:H=qsr:0.2:4", "outer:H=100,momentum=0.5,lr=0.7,stream=4,overlap=5". The
  // default of H is 8, and 100 for outer. defaults: used instead of these. Returns nothing if the name has none of
  // these forms. Throws UsageError.
  static std::optional<RoundSteps> parse(const std::string& text, const std::optional<RoundSteps>& defaults = {});
  std::string name() const;  // "local-sgd:8"
  std::unique_ptr<RoundMethod> method() const;
  void adjust(RoundsOptions&) const {}
  std::vector<SpecField> fields();          // its options, which must not outlive it
  static std::vector<std::string> names();  // "local-sgd", …
};

}  // namespace tandem
