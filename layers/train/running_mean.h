// The running mean of an epoch's losses. The losses are summed in device memory; the host reads the sum when needed,
// not after every step.
#pragma once
#include "core/tensor.h"

namespace tandem {

class RunningMean {
 public:
  struct Sums {
    double loss = 0;  // Σ loss · pictures
    double last = 0;  // the last loss
  };
  explicit RunningMean(Backend& backend);
  void begin(double loss);  // begins an epoch, or the rest of one, with this sum
  void add(const Tensor& loss, double pictures);
  Sums read() const;  // waits for the device

 private:
  Tensor sums_;
};

}  // namespace tandem
