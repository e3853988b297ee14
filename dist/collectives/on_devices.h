// Collectives on memory of devices. Our choice: NCCL over all ranks, on one host and between hosts, where every rank has a GPU of
// its own and the same libnccl; otherwise pinned memory of the hosts (staged.h), and rank 0 says why.
#pragma once
#include <memory>

#include "core/backend.h"
#include "dist/collectives/communicator.h"
#include "dist/collectives/nccl.h"

namespace tandem {

// `host`: the same ranks in the hosts' memory, not to be used while anything is under way here. deadline: seconds that any wait
// may last. Every rank calls it, and it waits for all. `backend` outlives it.
std::unique_ptr<Communicator> on_devices(std::shared_ptr<Communicator> host, Backend& backend, double deadline = 300,
                                         const NcclLibrary& nccl = installed_nccl());

}  // namespace tandem
