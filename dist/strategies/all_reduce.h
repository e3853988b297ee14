// Synchronous data parallelism: every rank has the whole model and a share of every batch, the gradients are summed over the
// ranks while backward still runs, and every rank makes the same step. What n ranks with b pictures each compute is what one
// machine computes with n·b pictures (batch norm aside: it sees a rank's own pictures, unless sync_batch_norm.h is asked for).
//
// The gradient vector is cut into buckets, ranges of it. A thread of the strategy reduces each bucket as soon as backward has
// finished it, in an order that is the same on all ranks: the one in which rank 0's first backward finished them. Nothing is
// packed or copied. Parameters change only when the whole step has arrived. On devices (on_devices.h) the buckets lie in their
// memory, and an event behind each tells the thread that it is finished.
#pragma once
#include <memory>

#include "dist/collectives/communicator.h"
#include "dist/collectives/nccl.h"
#include "layers/train/strategy.h"

namespace tandem {

struct AllReduceOptions {
  std::int64_t bucket_bytes = 0;    // 0: an eighth of the vector, between 256 KiB and 4 MiB
  DType wire = DType::f32;          // bf16: gradients travel rounded, in half the bytes
  double top_k = 0;  // the share of a bucket that travels, its largest (top_k.h; on the host, in f32); 0: all of it
  std::int64_t check_every = 1000;  // steps between two comparisons of all ranks' parameters; 0: only at the end
  double deadline = 300;            // seconds that a device may need for anything
  const NcclLibrary* nccl = nullptr;  // null: the installed one
};

// Throws CommunicationError from begin() and
// step() when another rank fails, and Error when ranks do not have the same model.
std::unique_ptr<Strategy> all_reduce(std::unique_ptr<Communicator> communicator, const AllReduceOptions& options = {});

}  // namespace tandem
