// A worker's round under an asynchronous outer optimizer (Liu et al. 2024, arXiv 2401.09135): from the weights θ that
// the servers sent, the worker makes H steps of its own with any optimizer, whose state stays with it. What it pushes
// is
//
//   Δ = θ − x
//
// which is a gradient for the servers' update rule (delayed-nesterov; γ is its learning rate, β its momentum). It goes
// on from the weights that come back. Nobody waits for anybody, or under quorum:K for no more than K workers and the
// grace time. A slower worker makes fewer steps a round: H_w = ⌊v_w/v_max·H⌋ (coordinator.h).
#pragma once
#include <algorithm>
#include <cmath>

#include "dist/strategies/averages.h"
#include "dist/strategies/on_host.h"
#include "dist/strategies/rounds.h"
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
  // The gradients become Δ. False: it is not finite.
  bool finish(FlatParameters& flat) {
    difference(flat.gradients, theta_, flat.values);
    const Buffer d = pushed_.download(flat.gradients);
    const float* at = static_cast<const float*>(d.data);
    return std::all_of(at, at + d.count, [](float v) { return std::isfinite(v); });
  }
  Tensor& momentum() { return momentum_; }  // the servers' m, in and out of checkpoints

 private:
  RoundSteps how_;
  Tensor theta_, momentum_;
  OnHost pushed_;
};

}  // namespace tandem
