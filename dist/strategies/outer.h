// The outer optimizer (DiLoCo, Douillard et al. 2023). From a common point θ every rank makes H steps of its own, with
// any optimizer, whose state stays where it is. What the ranks then have come to, on average, is one step of a second
// optimizer, SGD with Nesterov's momentum, whose gradient is the way from there back to θ:
//
//   Δ = mean over ranks (θ − x);  m = β·m + Δ;  θ = θ − γ(Δ + β·m);  x = θ
//
// With β = 0 and γ = 1 it is local-sgd. With momentum ranks train well with hundreds of steps between exchanges.
//
// stream=F (Streaming DiLoCo, Douillard et al. 2025): the vector is cut into F fragments. In every H steps each has its
// turn, at f·H/F, and is summed while training goes on. `overlap` steps later, or at the next fragment's turn, x = θ +
// (x − what was sent): what the rank did meanwhile is kept.
//
// An epoch ends with such a step of the whole vector, however few steps the last round has, so that what is evaluated
// and saved is θ. Many short rounds would apply the momentum too often: let H divide the steps of an epoch, or be far
// below or above them. m is in the checkpoint. A run that is resumed begins, on all ranks, with the inner optimizer's
// state of rank 0. Everything else (learning rates, wishes to stop, lost ranks) is as under local-sgd.
#pragma once
#include <memory>
#include <optional>
#include <string>

#include "dist/strategies/local_sgd.h"

namespace tandem {

struct OuterSteps {
  static constexpr std::int64_t until_next_turn = -1;
  Interval every{.steps = 100};
  // β and γ. The paper's β of 0.9 is for hundreds of rounds; 0.5 is our choice, for the tens that a short run has.
  double momentum = 0.5, learning_rate = 0.7;
  std::int64_t stream = 1;   // fragments
  std::int64_t overlap = 0;  // steps between sending a fragment and using its sum; 0: the step waits

  // "outer", "outer:H=100,momentum=0.5,lr=0.7", "outer:H=qsr:0.2:50,stream=4", with overlap=STEPS: where `stream` is
  // given, a sum is used at the next turn, unless `overlap` is given too. `how` has the defaults. Nothing where it is
  // another name. Throws UsageError.
  static std::optional<OuterSteps> parse(const std::string& text, OuterSteps how);
  static std::optional<OuterSteps> parse(const std::string& text) { return parse(text, OuterSteps()); }
  std::string name() const;
};

// Throws as local_sgd() does.
std::unique_ptr<Strategy> outer(std::unique_ptr<Communicator> communicator, const OuterSteps& how,
                                const LocalSgdOptions& options = {});
// What outer() computes with one fragment and a fixed H, in blocking calls on the host.
std::unique_ptr<Strategy> naive_outer(std::unique_ptr<Communicator> communicator, const OuterSteps& how);

}  // namespace tandem
