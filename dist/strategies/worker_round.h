// A worker's round under an asynchronous outer optimizer (Liu et al. 2024, arXiv 2401.09135). From the weights θ that
// the servers sent, the worker makes H local steps with any optimizer, whose state stays on the worker. It pushes
//
//   Δ = θ − x
//
// as a gradient for the servers' update rule (delayed-nesterov; γ is its learning rate, β its momentum). It continues
// from the weights in the answer. No worker waits, or under quorum:K it waits only for K workers and the grace time. A
// slower worker makes fewer steps per round: H_w = ⌊v_w/v_max·H⌋ (coordinator.h).
#pragma once
#include <algorithm>
#include <cmath>

#include "dist/strategies/averages.h"
#include "dist/strategies/local_steps.h"
#include "dist/strategies/on_host.h"
#include "layers/optim/flat_parameters.h"

namespace tandem {

class WorkerRound {
 public:
  explicit WorkerRound(const RoundSteps& how) : how_(how) {}
  const RoundSteps& how() const { return how_; }
  void begin(const FlatParameters& flat) {
    theta_ = Tensor::like(flat.values);
    momentum_ = Tensor::like(flat.values);
    momentum_.fill(0);
  }
  void starts(const FlatParameters& flat) { theta_.copy_from(flat.values); }
  // Writes Δ to the gradients. False: it is not finite.
  bool finish(FlatParameters& flat) {
    difference(flat.gradients, theta_, flat.values);
    const Buffer d = pushed_.download(flat.gradients);
    const float* at = static_cast<const float*>(d.data);
    return std::all_of(at, at + d.count, [](float v) { return std::isfinite(v); });
  }
  Tensor& momentum() { return momentum_; }  // the servers' m, to and from checkpoints

 private:
  RoundSteps how_;
  Tensor theta_, momentum_;
  OnHost pushed_;
};

}  // namespace tandem
