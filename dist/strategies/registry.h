// The named strategies, as in `tandem-run --strategy local-sgd:8`. registry.cpp has their table and defines
// strategy_from_environment (layers/train/strategy.h). A program can add its own strategies there.
#pragma once
#include <string>

#include "dist/server/straggler_emulation.h"
#include "layers/train/strategy.h"

namespace tandem {

// Whether a job with this strategy continues when a rank other than 0 is lost.
bool goes_on_without_lost_ranks(const std::string& text);
bool ranks_return(const std::string& text);  // lost ranks may rejoin one by one
// Makes the steps of this rank take longer (straggler_emulation.h), under any strategy.
void emulate(Strategy& strategy, const StragglerEmulation& stragglers);
std::string strategy_table();  // all names with their options, in Markdown
// The text with one more option for each of the values, which have ',' between them.
std::string with_option(const std::string& strategy, const std::string& key, const std::string& values);

}  // namespace tandem
