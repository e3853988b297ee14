// The metric sums of an epoch on this rank. Losses and correct rows are summed in device memory; the host reads the
// sums when needed, not after every step.
#pragma once
#include "layers/train/strategy.h"

namespace tandem {

class EpochSums {
 public:
  explicit EpochSums(Backend& backend);
  void begin(const MetricSums& sums);                  // begins an epoch, or the rest of one, with these sums
  void count(std::int64_t samples);                    // of a batch, also if its step is a replay
  void add(const Tensor& loss, std::int64_t samples);  // the mean loss of a batch; only queues work on a device
  MetricSums read(double* last_loss = nullptr) const;  // waits for the device
  Tensor correct;                                      // i32 [1]: correct rows, which the loss counts

 private:
  Tensor loss_;  // the sum over samples, and the last loss
  double samples_ = 0;
};

}  // namespace tandem
