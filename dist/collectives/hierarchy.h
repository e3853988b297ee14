// Several ranks on several hosts: shared memory inside a host, messages between hosts. An all-reduce is a
// reduce-scatter on every host, an all-reduce of each piece between the ranks that hold it (rank k of every host: one
// lane), and an all-gather on every host. With h hosts each host sends 2(h−1)/h·M bytes, as if it were one rank.
//
// Three stages of different collectives may run at the same time, each stage in the order of the calls.
#pragma once
#include <memory>

#include "dist/collectives/communicator.h"

namespace tandem {

// base: a communicator of all ranks, with messages. host: equal on ranks that share memory. Returns `base` if the hosts
// have different numbers of ranks, or one rank each. With one host it returns its node communicator. All ranks call
// this; it waits for all.
std::unique_ptr<Communicator> hierarchy(std::unique_ptr<Communicator> base, int host);

}  // namespace tandem
