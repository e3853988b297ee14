// From the environment to a communicator: who am I, where are the others, how do we reach each other.
#pragma once
#include <memory>

#include "dist/communicator.h"
#include "dist/environment.h"

namespace tandem {

// Of all ranks that were started together; of one, where the environment names no launcher. Waits for all to come. Throws
// UsageError when something must be set, Error when ranks are missing or do not fit together.
std::unique_ptr<Communicator> communicator_from_environment(const Variables& variables = process_environment());

}  // namespace tandem
