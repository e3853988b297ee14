#include "dist/collectives/on_devices.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "dist/collectives/nccl.h"
#include "dist/collectives/staged.h"

namespace tandem {
namespace {

// Sent to all ranks, as bytes.
struct DeviceRecord {
  char device[40] = {};
  std::int32_t nccl = 0;  // its version; 0: it has none
};

// The reason why NCCL cannot connect all ranks; empty: it can.
std::string why_not_nccl(const std::vector<DeviceRecord>& all, const Communicator& ranks) {
  for (std::size_t r = 0; r < all.size(); r++) {
    if (!all[r].device[0]) return ranks.where(int(r)) + " has no GPU";
    if (all[r].nccl == 0) return ranks.where(int(r)) + ": its build has no NCCL";
    if (all[r].nccl != all[0].nccl)
      return ranks.where(0) + " has NCCL " + std::to_string(all[0].nccl) + ", " + ranks.where(int(r)) + " " +
             std::to_string(all[r].nccl);
    for (std::size_t q = 0; q < r; q++)
      if (std::strcmp(all[q].device, all[r].device) == 0)
        return ranks.where(int(q)) + " and " + ranks.where(int(r)) + " share a GPU";
  }
  return "";
}

}  // namespace

std::unique_ptr<Communicator> on_devices(std::shared_ptr<Communicator> host, Backend& backend, double deadline) {
  std::vector<DeviceRecord> all(std::size_t(host->size()));
  DeviceRecord& mine = all[std::size_t(host->rank())];
  std::strncpy(mine.device, backend.identity().c_str(), sizeof mine.device - 1);
  mine.nccl = nccl_version();
  host->all_gather({all.data(), std::int64_t(all.size() * sizeof(DeviceRecord)), DType::u8}).wait();
  const std::string why = why_not_nccl(all, *host);
  if (why.empty()) return over_nccl(std::move(host), backend, {.deadline = deadline});
  if (host->rank() == 0)
    std::fprintf(stderr, "gradients go through the hosts' memory, not over NCCL: %s\n", why.c_str());
  return staged(std::move(host), backend, {.deadline = deadline});
}

void DataAndFlags::begin(Backend& backend, double deadline) {
  if (!backend.asynchronous()) return;
  flags_ = host_->split(0, host_->rank());
  device_ = on_devices(host_, backend, deadline);
  backend.synchronize();
}
void DataAndFlags::end() {
  sent_by_device_ = sent_bytes();
  device_.reset();
  flags_.reset();
}
std::uint64_t DataAndFlags::sent_bytes() const {
  return std::max({sent_by_device_, device_ ? device_->traffic().bytes : 0, host_->traffic().bytes});
}

}  // namespace tandem
