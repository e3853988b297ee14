// Linked if there is no network library. It refuses a start as one of several ranks: each rank would train a separate
// copy.
#include "dist/job/environment.h"
#include "layers/train/strategy.h"

namespace tandem {

std::unique_ptr<Strategy> strategy_from_environment(const std::vector<NamedStrategy>&) {
  if (const Place p = place_in(); p.size > 1)
    refuse("started by ", p.family, " as rank ", p.rank, " of ", p.size,
           ", but this build has no network library: install libucx-dev and libssl-dev and build again");
  return std::make_unique<Strategy>();
}

}  // namespace tandem
