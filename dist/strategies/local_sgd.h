// Ranks that make several steps of their own between two exchanges. Every rank has the whole model and a share of every
// batch, as under all-reduce, but steps by the gradient of its share alone; what is exchanged, once in so many steps,
// is weights:
//
//   local-sgd       all go on from the mean of their weights (Stich 2018)
//   post-local-sgd  the same, with one step between exchanges until the learning rate first decays: until it falls by a
//                   tenth from one step to the next, or to half of its largest; where it never does, for half of the
//                   run (Lin et al. 2018)
//   cocod-sgd       the mean is made while the next steps run, and then what they did is added to it:
//                   x = mean of what was sent + (x − what this rank sent) (Shen et al. 2019)
//   easgd           each rank is drawn to a centre z, and the centre to all of them: x −= α(x − z), z += Σα(x − z),
//                   α = 0.9/ranks. That sum, too, is made while the next steps run, and nothing is late: it is not
//                   needed before the next exchange. What is evaluated, saved, and left at the end is the centre; ranks
//                   go on from their own weights. (Zhang, Choromanska and LeCun 2015, the synchronous form. In the
//                   simulator workers come to the centre one by one, as in the asynchronous one.)
//
// Velocities and moments stay where they are: any optimizer will do. With SGD one step between exchanges is all-reduce,
// since the mean of velocities is the velocity of the mean. A picture weighs the same on all ranks, also in a last
// batch of which they have shares that differ. The learning rate is not scaled by the number of ranks, since a step is
// made on the batch of one rank, for which it was chosen.
//
// At the end of an epoch all ranks hold the mean, or the centre, and running statistics are merged as under all-reduce.
// Wishes to stop and losses that are not finite ride on the exchanges, so all ranks hear of them at the same step;
// under cocod-sgd and easgd that is the exchange after. When a rank is lost, the one that writes what is left writes
// its own weights: at most so many steps past an exchange. A run that is resumed begins, on all ranks, with the
// velocity of rank 0, and under easgd with the centre.
#pragma once
#include <memory>
#include <optional>
#include <string>

#include "dist/collectives/communicator.h"
#include "dist/collectives/nccl.h"
#include "dist/strategies/interval.h"
#include "layers/train/strategy.h"

namespace tandem {

struct LocalSteps {
  enum class Kind { local, post_local, cocod, elastic } kind = Kind::local;
  Interval every = {};  // between exchanges

  // "local-sgd:8", "cocod-sgd", "local-sgd:qsr:0.2:4" …: STEPS is 8 where it is not given. Nothing where the name is
  // none of these. Throws UsageError.
  static std::optional<LocalSteps> parse(const std::string& text);
  std::string name() const;  // "local-sgd:8"
};

struct LocalSgdOptions {
  std::int64_t bucket_bytes = 0;      // 0: an eighth of the vector, between 256 KiB and 4 MiB
  double deadline = 300;              // seconds that a device may need for anything
  const NcclLibrary* nccl = nullptr;  // null: the installed one
};

// Throws CommunicationError from begin() and at exchanges when another rank fails, and Error when ranks do not have the
// same model.
std::unique_ptr<Strategy> local_sgd(std::unique_ptr<Communicator> communicator, const LocalSteps& how,
                                    const LocalSgdOptions& options = {});
// What local_sgd() computes for Kind::local, in blocking calls on the host.
std::unique_ptr<Strategy> naive_local_sgd(std::unique_ptr<Communicator> communicator, std::int64_t steps);

}  // namespace tandem
