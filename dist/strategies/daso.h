// DASO (Coquelin et al. 2021, arXiv 2104.05588): training where links between hosts are slow and those inside a host
// are fast. Every batch: gradients are averaged over the ranks of a host, and all of them make the same step. Once in B
// batches the hosts exchange weights, and training goes on meanwhile:
//
//   group k       the ranks with local index k, one of each host. One group is active; the next exchange is the next
//   group's an exchange   Σ x over the P hosts of the group, non-blocking, in chunks; W batches later its result is
//   merged and
//                 broadcast inside the hosts
//   merge         x = Σ(as sent)/P + (x − x as sent): the mean, and what this host did since; or, as published,
//                 x = (2·W·x + Σ(as sent)) / (2·W + P)
//   blocking      x = Σ x / P at once: in the last batch of an epoch, and in every batch of the first and last epochs,
//   then
//                 with bf16 on the wire
//   plateau       three epochs in a row without 5 % less training loss than the best: B and W become smaller, and after
//                 B = 1 the longest again
//
// Where a layer is cut over the ranks of a host (hybrid.h), group k has slice k. So at every exchange each group
// averages its slice between hosts, and slices are not averaged inside a host.
//
// After the last batch of an epoch all ranks hold the same weights. With B = 0 and f32 a step is that of all-reduce for
// updates that are linear in the gradient (SGD with momentum). AdamW, LARS and clipping see the gradient of a host and
// not of all; velocities stay local, and a run that is resumed begins with rank 0's. Every host has the same number of
// ranks. On one host it is all-reduce.
#pragma once
#include <memory>

#include "dist/strategies/host_steps.h"

namespace tandem {

std::unique_ptr<Strategy> daso(DasoRanks ranks, const DasoOptions& options, const DasoSettings& settings = {});

}  // namespace tandem
