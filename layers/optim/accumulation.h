// Gradient accumulation: one update for several batches, used when a large batch does not fit into memory. The gradient
// of the update is the mean over all their pictures, also when the last batch is smaller. Batch norm uses each batch
// separately.
//
//   for each batch:
//     accumulation.begin(batch);
//     … loss = …
//     if (accumulation.backward(loss, batch)) optimizer.step(&accumulation.loss());
#pragma once
#include "core/batch.h"
#include "layers/optim/optimizer.h"

namespace tandem {

class Accumulation {
 public:
  // A step has `batches` batches; an epoch of batches_per_epoch ends with a step in any case.
  Accumulation(FlatParameters& flat, Optimizer& optimizer, std::int64_t batches, std::int64_t batches_per_epoch)
      : flat_(flat), optimizer_(optimizer), batches_(batches), per_epoch_(batches_per_epoch) {
    require(batches >= 1, "a step of ", batches, " batches: it needs at least one");
  }

  std::int64_t steps_per_epoch() const { return (per_epoch_ + batches_ - 1) / batches_; }
  // Call before the forward pass. Sends the step's values to the device, since the step may be a replay. Zeroes the
  // gradients when a new step begins.
  void begin(const Batch& batch);
  // loss: the mean over this batch. Returns true when the step is due.
  bool backward(const Variable& loss, const Batch& batch) { return backward(loss, loss, batch); }
  bool backward(const Variable& loss, const Variable& scaled, const Batch& batch);  // from the scaled loss
  const Tensor& loss() const { return loss_; }  // of the step so far; not finite if the loss of one batch was not

 private:
  FlatParameters& flat_;
  Optimizer& optimizer_;
  std::int64_t batches_, per_epoch_, count_ = 0, pictures_ = 0;  // count_: batches in the gradients; 0: a step begins
  Tensor loss_;
};

}  // namespace tandem
