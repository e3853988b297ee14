// Synchronous data parallelism: every rank has the whole model and a share of every batch, the gradients are summed
// over the ranks while backward still runs, and every rank makes the same step. What n ranks with b pictures each
// compute is what one machine computes with n·b pictures (batch norm aside: it sees a rank's own pictures, unless
// sync_batch_norm.h is asked for). Gradients are exchanged in buckets (gradient_buckets.h); slices of a layer that is
// cut over ranks, among the ranks that have the same slice. Parameters change only when the whole step has arrived.
#pragma once
#include <memory>

#include "dist/strategies/gradient_buckets.h"
#include "layers/train/strategy.h"

namespace tandem {

class SlicedClassifier;

struct AllReduceOptions {
  std::int64_t bucket_bytes = 0;  // the first six: BucketOptions
  DType wire = DType::f32;
  double top_k = 0;
  std::int64_t power_sgd = 0;
  double deadline = 300;
  const NcclLibrary* nccl = nullptr;
  std::shared_ptr<SlicedClassifier> classifier = nullptr;  // cut over the ranks of a host: hybrid.h
  std::int64_t check_every = 1000;  // steps between two comparisons of all ranks' parameters; 0: only at the end
};

// Throws CommunicationError from begin() and step() when another rank fails, and Error when ranks do not have the same
// model.
std::unique_ptr<Strategy> all_reduce(std::unique_ptr<Communicator> communicator, const AllReduceOptions& options = {});

}  // namespace tandem
