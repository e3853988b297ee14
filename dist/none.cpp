// Linked where there is no network library. A start as one of several ranks is refused here: running on would train as many
// separate copies.
#include <cstdlib>

#include "layers/strategy.h"

namespace tandem {

std::unique_ptr<Strategy> strategy_from_environment() {
  for (const char* name : {"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "PET_NNODES"})
    if (const char* value = std::getenv(name); value && std::atoi(value) > 1)
      fail("started as one of several ranks (", name, "=", value,
           "), but this build has no network library: ", "unset it to train on one machine");
  return std::make_unique<Strategy>();
}

}  // namespace tandem
