// What a parameter server is refused for, and what of a program's recipe does not hold under it.
#pragma once
#include "dist/server/asynchrony.h"
#include "layers/optim/optimizer.h"

namespace tandem {

// Throws UsageError where nobody would train. Whoever can asks before the ranks have met.
void check_servers(int servers, int ranks);
// The optimizer's options, as the servers' rules go by them. Throws UsageError for one whose steps no server makes.
const SGDOptions& served_sgd(const Optimizer& optimizer, const Asynchrony& how);
// Notes on stderr.
void tell_what_does_not_hold(const Asynchrony& how, const Optimizer& optimizer, int workers, bool deterministic);

}  // namespace tandem
