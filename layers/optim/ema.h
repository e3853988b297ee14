// An exponential moving average of the weights, which mostly predicts better than the weights themselves.
#pragma once
#include "layers/optim/optimizer.h"

namespace tandem {

// average = d·average + (1 − d)·weights after every step, running statistics included. d is `decay`, and less in the
// first steps, (1 + t)/(10 + t) at step t, so that the draw the weights began with is soon forgotten.
class Ema {
 public:
  Ema(FlatParameters& flat, double decay);  // begins as a copy of the weights
  void update(const Optimizer& optimizer);  // after its step; does nothing when that was not applied

  // Exchanges weights and averages, exactly: twice, and everything is as before.
  void swap();
  // While it lives, the model has the averages: for evaluation.
  class Shown {
   public:
    explicit Shown(Ema& ema) : ema_(ema) { ema_.swap(); }
    ~Shown() { ema_.swap(); }
    Shown(const Shown&) = delete;

   private:
    Ema& ema_;
  };

  Tensor values, buffers;  // laid out as the flat parameters

 private:
  FlatParameters& flat_;
  double decay_;
};

}  // namespace tandem
