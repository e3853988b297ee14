// DASO (Coquelin et al. 2021, arXiv 2104.05588): training where links between hosts are slow and those inside a host are fast.
// Every batch: gradients are averaged over the ranks of a host, and all of them make the same step. Once in B batches the hosts
// exchange weights, and training goes on meanwhile:
//
//   group k       the ranks with local index k, one of each host. One group is active; the next exchange is the next group's
//   an exchange   Σ x over the P hosts of the group, non-blocking, in chunks; W batches later its result is merged and
//                 broadcast inside the hosts
//   merge         x = Σ(as sent)/P + (x − x as sent): the mean, and what this host did since; or, as published,
//                 x = (2·W·x + Σ(as sent)) / (2·W + P)
//   blocking      x = Σ x / P at once: in the last batch of an epoch, and in every batch of the first and last epochs, then
//                 with bf16 on the wire
//   plateau       three epochs in a row without 5 % less training loss than the best: B and W become smaller, and after
//                 B = 1 the longest again
//
// After the last batch of an epoch all ranks hold the same weights. With B = 0 and f32 a step is that of all-reduce for updates that are linear
// in the gradient (SGD with momentum). AdamW, LARS and clipping see the gradient of a host and not of all; velocities stay
// local, and a run that is resumed begins with rank 0's. Every host has the same number of ranks. On one host it is all-reduce.
#pragma once
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>

#include "dist/collectives/communicator.h"
#include "dist/collectives/nccl.h"
#include "layers/train/strategy.h"

namespace tandem {

// As in "daso:B=4,W=1". Where published and better behaviour differ, 1 is the better one and `daso:faithful` sets 0.
struct DasoOptions {
  std::int64_t B = 4, W = 1;               // batches from one exchange to the next, and from its start to its merge, at first
  std::int64_t warm_up = 4, cool_down = 4;  // epochs in which every batch blocks
  std::int64_t longest = 8;                // the B that follows after a plateau at B = 1
  std::int64_t bf16 = 1;                   // blocking epochs exchange in bf16; 0: in f32
  std::int64_t keep_progress = 1;          // the merge keeps all that a host did since the send; 0: 2W/(2W+P) of it
  std::int64_t differences = 1;            // bf16 of the difference from the last common state, with error feedback; 0: of x
  std::int64_t merge_first = 1;            // a pending exchange is merged before the next is sent, always after W batches;
                                           // 0: after the send, and after W batches only if the next batch does not send
  std::int64_t norms = 1;                  // running statistics are averaged at the end of an epoch; 0: each rank keeps its own

  // Nothing where the name is not daso's. Throws UsageError.
  static std::optional<DasoOptions> parse(const std::string& text);
  std::string name() const;  // with what differs from the default: "daso:B=8"
};

// When hosts exchange: a function of batches, epochs and training losses, the same on all ranks.
class DasoSchedule {
 public:
  explicit DasoSchedule(const DasoOptions& options) : o_(options), B_(options.B), W_(options.W) {}
  void begin_epoch(std::int64_t epoch, std::int64_t epochs);
  struct Turn {
    bool sends = false, blocks = false, merges = false;
    std::int64_t weight = 0;  // W of what is merged
  };
  Turn next(std::int64_t batch, std::int64_t last);  // after this batch of the epoch, of which `last` is the last one
  void end_epoch(double loss);
  bool blocking() const { return blocking_; }        // an epoch in which every batch blocks
  std::int64_t B() const { return B_; }
  std::int64_t W() const { return W_; }
  std::string state() const;  // for a checkpoint: "daso B W best bad"
  void restore(const std::string& state);

  static constexpr double improvement = 0.05;  // relative; less of it is none
  static constexpr int patience = 3;           // epochs without it in a row are a plateau

 private:
  DasoOptions o_;
  std::int64_t B_, W_;
  bool blocking_ = true, pending_ = false;
  std::int64_t sent_at_ = 0, weight_ = 0;
  double best_ = std::numeric_limits<double>::infinity();
  int bad_ = 0;
};

struct DasoRanks {
  std::unique_ptr<Communicator> everybody;
  std::unique_ptr<Communicator> gradients, host;  // two of this host's ranks: the first is used by a thread of its own
  std::unique_ptr<Communicator> across;           // the ranks with this one's local index
};
struct DasoSettings {
  double deadline = 300;
  std::int64_t bucket_bytes = 0;      // of gradients, and of chunks between hosts: BucketOptions
  const NcclLibrary* nccl = nullptr;  // null: the installed one
};
std::unique_ptr<Strategy> daso(DasoRanks ranks, const DasoOptions& options, const DasoSettings& settings = {});
// What daso() computes, in blocking calls on the host.
std::unique_ptr<Strategy> naive_daso(DasoRanks ranks, const DasoOptions& options);

}  // namespace tandem
