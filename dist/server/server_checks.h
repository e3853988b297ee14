// Configurations that a parameter server refuses, and settings of a program that have no effect under it.
#pragma once
#include "dist/server/asynchrony.h"
#include "layers/optim/optimizer.h"

namespace tandem {

// Throws UsageError if no rank would train. Call it before the rendezvous if possible.
void check_servers(int servers, int ranks);
// The optimizer's options, for the servers' rules. Throws UsageError for an optimizer that no server implements.
const SGDOptions& served_sgd(const Optimizer& optimizer, const Asynchrony& how);
// Prints notes on stderr.
void note_ineffective_options(const Asynchrony& how, const Optimizer& optimizer, int workers, bool deterministic);

}  // namespace tandem
