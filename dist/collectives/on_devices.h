// Collectives on memory of devices. Our choice: NCCL over all ranks, on one host and between hosts, where every rank
// has a GPU of its own and the same libnccl; otherwise pinned memory of the hosts (staged.h), and rank 0 says why.
#pragma once
#include <cstdint>
#include <memory>
#include <utility>

#include "core/backend.h"
#include "dist/collectives/communicator.h"
#include "dist/collectives/nccl.h"

namespace tandem {

// `host`: the same ranks in the hosts' memory, not to be used while anything is under way here. deadline: seconds that
// any wait may last. Every rank calls it, and it waits for all. `backend` outlives it.
std::unique_ptr<Communicator> on_devices(std::shared_ptr<Communicator> host, Backend& backend, double deadline = 300,
                                         const NcclLibrary& nccl = installed_nccl());

// A communicator for vectors of a backend, which may be a device's, and for a few numbers of the host beside them. On a
// device these have a communicator of their own: what is under way on its memory begins in an order of its own.
class DataAndFlags {
 public:
  explicit DataAndFlags(std::shared_ptr<Communicator> host) : host_(std::move(host)) {}
  // As on_devices(); nccl: null for the installed one. From here to end() the backend stays.
  void begin(Backend& backend, double deadline, const NcclLibrary* nccl);
  void end();
  Communicator& data() { return device_ ? *device_ : *host_; }
  Communicator& flags() { return flags_ ? *flags_ : *host_; }
  std::uint64_t sent_bytes() const;  // also before the end

 private:
  std::shared_ptr<Communicator> host_;
  std::unique_ptr<Communicator> device_, flags_;
  std::uint64_t sent_by_device_ = 0;
};

}  // namespace tandem
