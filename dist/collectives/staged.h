// Collectives on device memory, staged through the host. A chunk is copied to pinned memory, the host's communicator
// reduces it, and the result is copied back. Several chunks are in progress at once, so that copies and network
// overlap. Used where NCCL cannot be: several ranks on one GPU, a machine without libnccl.
//
// The caller sees to it that the device is done with a buffer before the call (an event, synchronize()), and leaves the
// buffer alone until the Work is done; then the result is in the device's memory.
#pragma once
#include <memory>

#include "core/backend.h"
#include "dist/collectives/communicator.h"

namespace tandem {

struct StagedOptions {
  std::size_t chunk_bytes = 1 << 20;
  int chunks = 4;         // on their way at once
  double deadline = 300;  // seconds that a copy may last
};

// `backend` outlives it. Where ranks add up in the order of their pieces (a ring of three or more), sums depend on the
// chunks.
std::unique_ptr<Communicator> staged(std::shared_ptr<Communicator> host, Backend& backend,
                                     const StagedOptions& options = {});

}  // namespace tandem
