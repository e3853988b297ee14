// NCCL: collectives between GPUs, by NVIDIA's library, if the build has it.
//
// NCCL waits without a deadline and does not notice the death of a rank on the same host. Its communicators are
// therefore non-blocking. Waiting for a Work polls the library's error, the device's event, the failures known to the
// host's communicator, and a deadline. A failure is sent to all ranks over the host's communicator, and each rank
// aborts its NCCL communicator. Every collective is also announced on the host's communicator (number, operation, type,
// count), so that an error names both calls when ranks differ.
#pragma once
#include <memory>

#include "core/backend.h"
#include "dist/collectives/communicator.h"

namespace tandem {

int nccl_version();  // 22809 is 2.28.9; 0: this build has no NCCL

struct NcclOptions {
  double deadline = 300;  // seconds that any wait may last
  double patience = 1;  // seconds until ranks that have left cause an error: they may have completed their part before
};

// Collectives on the memory of `backend`, a device that no other rank uses. Every rank calls it, and it waits for all.
// Before a call the device must be done with the buffer, and the buffer must stay unchanged until the Work is done.
// Tags are ignored: messages between two ranks arrive in the order of sending. Ranks that send to each other must call
// send and recv before they wait for either.
std::unique_ptr<Communicator> over_nccl(std::shared_ptr<Communicator> host, Backend& backend,
                                        const NcclOptions& options = {});

}  // namespace tandem
