// Collectives on device memory, staged through the host. A chunk is copied to pinned memory, the host's communicator
// reduces it, and the result is copied back. Several chunks are in progress at once, so copies and network overlap.
// Used if NCCL is not usable: several ranks on one GPU, a machine without libnccl.
//
// Before a call the device must be done with the buffer (an event, synchronize()), and the buffer must stay unchanged
// until the Work is done. Then the result is in the device's memory.
#pragma once
#include <memory>

#include "core/backend.h"
#include "dist/collectives/communicator.h"

namespace tandem {

struct StagedOptions {
  std::size_t chunk_bytes = 1 << 20;
  int chunks = 4;         // in progress at once
  double deadline = 300;  // seconds that a copy may last
};

// `backend` must outlive it. In a ring of three or more ranks, each piece of a chunk is added in its own order, so sums
// depend on the chunk size.
std::unique_ptr<Communicator> staged(std::shared_ptr<Communicator> host, Backend& backend,
                                     const StagedOptions& options = {});

}  // namespace tandem
