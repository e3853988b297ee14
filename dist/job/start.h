// From the environment to a communicator or a channel: who am I, where are the others, how do we reach each other.
#pragma once
#include <memory>
#include <string>

#include "dist/server/channel.h"
#include "dist/job/environment.h"

namespace tandem {

// Of all ranks that were started together; of one, where the environment names no launcher. Waits for all to come. Throws
// UsageError when something must be set, Error when ranks are missing or do not fit together.
std::unique_ptr<Communicator> communicator_from_environment(const Variables& variables = process_environment());

// The twin for a parameter server: a channel of a job that goes on when a rank other than 0 is lost. With TANDEM_INCARNATION=1
// (2, …) this rank comes back into a job that has lost it, from wherever it reaches rank 0.
std::unique_ptr<Channel> channel_from_environment(const Variables& variables = process_environment());

// Of a strategy's name: whether its job goes on when a rank other than 0 is lost.
bool goes_on_without_lost_ranks(const std::string& strategy);

}  // namespace tandem
