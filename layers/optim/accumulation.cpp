#include "layers/optim/accumulation.h"

#include "core/elementwise.h"

namespace tandem {

void Accumulation::begin(const Batch& batch) {
  if (count_ == 0) {
    flat_.zero_gradients();
    pictures_ = 0;
  }
  // Each loss is a mean over this rank's part of the batch. Its gradient is weighted with the number of pictures, so
  // the gradients of all batches and ranks add up to a sum over all pictures.
  pictures_ += batch.over_ranks();
  optimizer_.gradients_are_sums_of(batches_ == 1 ? 1 : double(pictures_));
  optimizer_.sync_hyperparameters();
}

bool Accumulation::backward(const Variable& loss, const Variable& scaled, const Batch& batch) {
  if (count_ == 0) flat_.zero_gradients();  // also if a step is repeated after it was interrupted
  const bool due = (batch.index + 1) % batches_ == 0 || batch.index + 1 == per_epoch_;
  flat_.backward(scaled, batches_ == 1 ? batch.weight() : double(batch.size()), due);
  Tensor sum = count_ == 0 ? loss.value() : Tensor::like(loss_);
  if (count_ > 0) add(loss_, loss.value(), sum);
  loss_ = sum;
  count_ = due ? 0 : count_ + 1;
  return due;
}

}  // namespace tandem
