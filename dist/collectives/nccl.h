// NCCL: collectives between GPUs, by NVIDIA's library. It is opened when it is wanted, so a program with one GPU needs
// no libnccl.
//
// NCCL waits without a deadline and does not notice the death of a rank on the same host. Its communicators are
// therefore non-blocking. Waiting for a Work polls the library's error, the device's event, the failures known to the
// host's communicator, and a deadline. A failure is sent to all ranks over the host's communicator, and each rank
// aborts its NCCL communicator. Every collective is also announced on the host's communicator (number, operation, type,
// count), so that an error names both calls when ranks differ.
#pragma once
#include <memory>
#include <string>

#include "core/backend.h"
#include "dist/collectives/communicator.h"

namespace tandem {

struct NcclFunctions;  // dist/collectives/nccl_functions.h

struct NcclLibrary {
  int version = 0;                           // 22809 is 2.28.9; 0: it cannot be used
  std::string why_not = {};                  // then
  const NcclFunctions* functions = nullptr;  // live as long as the program
};
// libnccl.so.2, opened at the first call.
const NcclLibrary& installed_nccl();

struct NcclOptions {
  double deadline = 300;  // seconds that any wait may last
  double patience = 1;    // seconds after which ranks that have left are missed: they may have done their part before
};

// Collectives on the memory of `backend`, a device that no other rank has. Every rank calls it, and it waits for all.
// The caller sees to it that the device is done with a buffer before the call, and leaves the buffer alone until the
// Work is done; tags of messages between two ranks are ignored: they arrive in the order in which they were sent. Ranks
// that send to each other call send and recv before they wait for either.
std::unique_ptr<Communicator> over_nccl(const NcclLibrary& nccl, std::shared_ptr<Communicator> host, Backend& backend,
                                        const NcclOptions& options = {});

}  // namespace tandem
