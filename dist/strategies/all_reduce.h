// Synchronous data parallelism. Every rank has the whole model and a share of every batch. The gradients are summed
// over the ranks while backward still runs, and every rank makes the same step. n ranks with b pictures each compute
// the same as one machine with n·b pictures. Batch norm is an exception: it uses a rank's own pictures, unless
// sync_batch_norm.h is enabled. Gradients are exchanged in buckets (gradient_buckets.h). Slices of a layer that is
// divided over ranks are exchanged among the ranks that have the same slice. Parameters change only after all gradients
// of a step have arrived.
#pragma once
#include <memory>

#include "dist/collectives/communicator.h"
#include "layers/train/strategy.h"

namespace tandem {

class SlicedClassifier;

struct AllReduceOptions {
  std::int64_t bucket_bytes = 0;  // 0: an eighth of the vector, between 256 KiB and 4 MiB
  DType wire = DType::f32;        // bf16: gradients are rounded and sent in half the bytes
  // the fraction of a bucket's elements that is sent, the largest (top_k.h; on the host, in f32); 0: all
  double top_k = 0;
  // The rank of the matrix products that are sent (power_sgd.h; on the host, in f32); 0: the gradients are sent
  std::int64_t power_sgd = 0;
  double deadline = 300;
  std::shared_ptr<SlicedClassifier> classifier = nullptr;  // divided over the ranks of a host: hybrid.h
  std::int64_t check_every = 1000;  // steps between two comparisons of all ranks' parameters; 0: only at the end
};

// Throws CommunicationError from begin() and step() if another rank fails, and Error if the ranks have different
// models.
std::unique_ptr<Strategy> all_reduce(std::unique_ptr<Communicator> communicator, const AllReduceOptions& options = {});

}  // namespace tandem
