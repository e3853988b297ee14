// An exponential moving average of the weights. It usually predicts better than the weights themselves.
#pragma once
#include "layers/optim/optimizer.h"

namespace tandem {

// After every step average = d·average + (1 − d)·weights, also for buffers. d is `decay`, but at most (1 + t)/(10 + t)
// at step t, so that the initial weights lose their influence quickly.
class Ema {
 public:
  Ema(FlatParameters& flat, double decay);  // begins as a copy of the weights
  void update(const Optimizer& optimizer);  // call after a step; does nothing if the step was not applied

  // Swaps weights and averages, exactly. A second call restores both.
  void swap();
  // While an object of this class exists, the model holds the averages. For evaluation.
  class Shown {
   public:
    explicit Shown(Ema& ema) : ema_(ema) { ema_.swap(); }
    ~Shown() { ema_.swap(); }
    Shown(const Shown&) = delete;

   private:
    Ema& ema_;
  };

  Tensor values, buffers;  // with the layout of the flat parameters

 private:
  FlatParameters& flat_;
  double decay_;
};

}  // namespace tandem
