// The strategies that can be named, as in `tandem-run --strategy local-sgd:8`: the table is in registry.cpp, which also
// defines strategy_from_environment (layers/train/strategy.h). A program names strategies of its own there too.
#pragma once
#include <string>

namespace tandem {

// Whether the job of the strategy with this name goes on when a rank other than 0 is lost.
bool goes_on_without_lost_ranks(const std::string& name);
bool ranks_return(const std::string& name);  // one by one, once they were lost

}  // namespace tandem
