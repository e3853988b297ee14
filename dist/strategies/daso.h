// DASO (Coquelin et al. 2021, arXiv 2104.05588): training with slow links between hosts and fast links inside a host.
// In every batch the gradients are averaged over the ranks of a host, and all of these make the same step. Once in B
// batches the hosts exchange weights while training continues:
//
//   group k       the ranks with local index k, one of each host. One group is active; the groups take turns, one
//                 exchange each
//   an exchange   Σ x over the P hosts of the group, non-blocking, in chunks; W batches later its result is merged
//                 and broadcast inside the hosts
//   merge         x = Σ(as sent)/P + (x − x as sent): the mean, plus this host's change since; or, as published,
//                 x = (2·W·x + Σ(as sent)) / (2·W + P)
//   blocking      x = Σ x / P at once: in the last batch of an epoch, and in every batch of the first and last
//                 epochs, then with bf16 on the wire
//   plateau       three consecutive epochs without 5 % less training loss than the best: B and W are reduced; after
//                 B = 1, B becomes `longest` again
//
// If a layer is divided over the ranks of a host (hybrid.h), group k has slice k. So at every exchange each group
// averages its slice between hosts, and slices are not averaged inside a host.
//
// After the last batch of an epoch all ranks hold the same weights. With B = 0 and f32 a step equals that of all-reduce
// if the update is linear in the gradient (SGD with momentum). AdamW, LARS and clipping use a host's gradient and not
// that of all hosts. Velocities stay local, and a resumed run begins with rank 0's. Every host must have the same
// number of ranks. On one host DASO is all-reduce.
#pragma once
#include <memory>

#include "dist/strategies/host_steps.h"

namespace tandem {

std::unique_ptr<Strategy> daso(DasoRanks ranks, const DasoOptions& options, const DasoSettings& settings = {});

}  // namespace tandem
