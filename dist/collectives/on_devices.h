// Collectives on device memory. NCCL connects all ranks of all hosts if every rank has its own GPU and the same NCCL
// (our choice). Otherwise data passes through pinned host memory (staged.h), and rank 0 prints the reason.
#pragma once
#include <cstdint>
#include <memory>
#include <utility>

#include "core/backend.h"
#include "dist/collectives/communicator.h"

namespace tandem {

// `host`: the same ranks, on host memory; do not use it while an operation is in progress here. deadline: seconds that
// any wait may last. Every rank calls it, and it waits for all. `backend` must outlive it.
std::unique_ptr<Communicator> on_devices(std::shared_ptr<Communicator> host, Backend& backend, double deadline = 300);

// A communicator for vectors of a backend, which may be a device, and one for a few numbers in host memory. With a
// device these are separate communicators, because operations on device memory begin in their own order.
class DataAndFlags {
 public:
  explicit DataAndFlags(std::shared_ptr<Communicator> host) : host_(std::move(host)) {}
  // As on_devices(). The backend must stay valid until end().
  void begin(Backend& backend, double deadline);
  void end();
  Communicator& data() const { return device_ ? *device_ : *host_; }
  Communicator& flags() const { return flags_ ? *flags_ : *host_; }
  bool on_device() const { return device_ != nullptr; }
  std::uint64_t sent_bytes() const;  // also valid before end()

 private:
  std::shared_ptr<Communicator> host_;
  std::unique_ptr<Communicator> device_, flags_;
  std::uint64_t sent_by_device_ = 0;
};

}  // namespace tandem
