// Ranks that are threads of a test and count as those of several hosts, with the communicators that a Job would make
// for DASO.
#pragma once
#include <memory>
#include <utility>
#include <vector>

#include "dist/collectives/in_process.h"
#include "dist/strategies/rounds.h"

namespace tandem::test {

class HostRanks {
 public:
  HostRanks(int hosts, int per_host, const InProcessOptions& between_hosts = {.deadline = 30}) : per_host_(per_host) {
    for (auto* kind : {&everybody_, &gradients_, &host_}) *kind = in_process(hosts * per_host, {.deadline = 30});
    across_ = in_process(hosts * per_host, between_hosts);
  }
  // Every rank calls it, in its own thread, and waits for all.
  RoundRanks of(int rank) {
    const auto r = std::size_t(rank);
    auto part = [&](auto& all, int color) { return std::exchange(all[r], nullptr)->split(color, rank); };
    return {.everybody = std::move(everybody_[r]),
            .gradients = part(gradients_, rank / per_host_),
            .host = part(host_, rank / per_host_),
            .across = part(across_, rank % per_host_)};
  }

 private:
  int per_host_;
  std::vector<std::unique_ptr<Communicator>> everybody_, gradients_, host_, across_;
};

}  // namespace tandem::test
