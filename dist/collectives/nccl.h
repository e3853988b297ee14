// NCCL: collectives between GPUs, by NVIDIA's library. It is opened when it is wanted, so a program with one GPU needs no
// libnccl.
//
// NCCL itself waits for ever, and does not notice when a rank on the same host dies. So its communicators do not block, and who
// waits for a Work asks in turn the library for its error, the device for its event, the host's communicator for ranks that have
// failed, and a deadline. What fails is told to all ranks over the host, and each gives up its own NCCL communicator.
// Every collective is announced on the host's communicator meanwhile (number, operation, type, count), so that ranks that call
// different things are told both calls.
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

// Collectives on the memory of `backend`, a device that no other rank has. Every rank calls it, and it waits for all. The caller
// sees to it that the device is done with a buffer before the call, and leaves the buffer alone until the Work is done; tags of
// messages between two ranks are ignored: they arrive in the order in which they were sent. Ranks that send to each other call
// send and recv before they wait for either.
std::unique_ptr<Communicator> over_nccl(const NcclLibrary& nccl, std::shared_ptr<Communicator> host, Backend& backend,
                                        const NcclOptions& options = {});

}  // namespace tandem
