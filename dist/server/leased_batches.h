// The batches of the leases that a worker draws, as a BatchSource for fit(). A lease is one share of a step's batches
// (work_leases.h). The loader's thread prepares the batch after the current one. So the next lease is drawn while the
// current one is trained.
#pragma once
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "layers/train/own_part.h"

namespace tandem {

class LeasedBatches : public BatchSource {
 public:
  struct WorkLeases {
    std::function<void(std::int64_t first)> start;      // an epoch begins with that lease
    std::function<std::optional<std::int64_t>()> draw;  // waits; nothing: the run is over
    // The lease that draw() will return, if it is known; does not wait
    std::function<std::optional<std::int64_t>()> coming;
    std::function<std::int64_t()> count = {};  // consecutive leases that draw() returned at once; empty: one
  };
  // shares: leases per step. part of parts: this rank trains part `part` of `parts` of a lease.
  // `all` may be a worker's own part: its batches then take the place of those that the leases number.
  LeasedBatches(BatchSource& all, int shares, int accumulate, WorkLeases leases, int part = 0, int parts = 1);

  void share(int, int) override {}
  bool grows_with_ranks() const override { return all_.grows_with_ranks(); }
  std::int64_t batches_per_epoch() const override { return per_epoch_; }
  std::int64_t pictures_per_epoch() const override { return all_.pictures_per_epoch(); }
  Parts parts(int workers) const override { return all_.parts(workers); }
  void start(std::int64_t epoch, std::int64_t first) override;
  bool next(Batch& batch) override;
  Batch make(std::int64_t epoch, std::int64_t index) override { return all_.make(epoch, index); }
  std::map<std::string, std::string> description() const override { return all_.description(); }

  void look_ahead();  // lets the loader prepare the next batch if it is known; does not wait
  std::int64_t leases_per_epoch() const { return (per_epoch_ + accumulate_ - 1) / accumulate_ * shares_; }
  // The epoch of the next batch. Nothing: it is not drawn yet, or there is none.
  std::optional<std::int64_t> epoch() const {
    return lease_ ? std::optional(*lease_ / leases_per_epoch()) : std::nullopt;
  }
  bool lease_ends() const { return !lease_; }                         // the current batch is its last
  std::int64_t take_samples() { return std::exchange(samples_, 0); }  // in the batches since the last call

 private:
  struct Place {
    std::int64_t share, epoch, index;
  };
  Place place(std::int64_t lease, std::int64_t k) const {  // of the lease's k-th batch
    return {lease % shares_, lease / leases_per_epoch(), lease % leases_per_epoch() / shares_ * accumulate_ + k};
  }

  BatchSource& all_;
  OwnPart* own_;  // all_, if it is one
  WorkLeases leases_;
  std::int64_t shares_, accumulate_, part_, parts_, per_epoch_, epoch_ = 0, share_ = 0, samples_ = 0;
  std::optional<std::int64_t> lease_;
  std::int64_t next_ = 0, batches_ = 1;  // counted in batches of the lease
  bool ahead_ = false;                   // the next batch is being prepared
  bool begun_ = false;                   // the own part, which goes on without end
};

}  // namespace tandem
