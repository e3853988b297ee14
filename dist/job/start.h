// From the environment to a strategy (strategy_from_environment, layers/train/strategy.h).
#pragma once
#include <string>

namespace tandem {

// Of a strategy's name: whether its job goes on when a rank other than 0 is lost.
bool goes_on_without_lost_ranks(const std::string& strategy);

}  // namespace tandem
