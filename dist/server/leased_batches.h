// The batches of the leases that a worker draws, as a BatchSource for fit(). A lease is one share of a step's batches
// (work_leases.h). The loader's thread prepares the batch after the current one. So the next lease is drawn while the
// current one is trained.
#pragma once
#include <cmath>
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
  LeasedBatches(BatchSource& all, int shares, int accumulate, WorkLeases leases, int part = 0, int parts = 1)
      : all_(all),
        own_(dynamic_cast<OwnPart*>(&all)),
        leases_(std::move(leases)),
        shares_(shares),
        accumulate_(accumulate),
        part_(part),
        parts_(parts) {
    all_.share(part, shares * parts);
    per_epoch_ = all_.batches_per_epoch();
  }

  void share(int, int) override {}
  bool grows_with_ranks() const override { return all_.grows_with_ranks(); }
  std::int64_t batches_per_epoch() const override { return per_epoch_; }
  std::int64_t pictures_per_epoch() const override { return all_.pictures_per_epoch(); }
  Parts parts(int workers) const override { return all_.parts(workers); }
  void start(std::int64_t epoch, std::int64_t first) override {
    epoch_ = epoch;
    if (own_ && !std::exchange(begun_, true)) own_->start(epoch, first);
    leases_.start(epoch * leases_per_epoch() + (first + accumulate_ - 1) / accumulate_ * shares_);
  }
  bool next(Batch& batch) override {
    if (!lease_) {
      lease_ = leases_.draw();
      next_ = 0;
      batches_ = accumulate_ * (leases_.count ? leases_.count() : 1);
    }
    if (!lease_ || *lease_ / leases_per_epoch() > epoch_) return false;
    const Place p = place(*lease_, next_);
    if (p.share != std::exchange(share_, p.share)) all_.share(int(share_ * parts_ + part_), int(shares_ * parts_));
    batch = own_ ? own_->following() : all_.make(p.epoch, p.index);
    const std::int64_t whole = batch.over_ranks();
    if (!own_)
      batch.global =
          parts_ > 1 ? whole * (share_ + 1) / shares_ - whole * share_ / shares_ : 0;  // pictures of the lease
    const double weight = own_ && shares_ > 1 ? own_->weight() * double(own_->pictures_per_epoch()) / double(whole) : 1;
    samples_ += std::llround(weight * double(batch.size()));  // the weight in the mean of a step of all workers
    if (++next_ == batches_ || p.index + 1 == per_epoch_) lease_.reset();
    ahead_ = false;
    look_ahead();
    return true;
  }
  Batch make(std::int64_t epoch, std::int64_t index) override { return all_.make(epoch, index); }
  std::map<std::string, std::string> description() const override { return all_.description(); }

  // Lets the loader prepare the next batch if it is known; does not wait.
  void look_ahead() {
    if (ahead_) return;
    const auto lease = lease_ ? lease_ : leases_.coming();
    if (!lease) return;
    const Place p = place(*lease, lease_ ? next_ : 0);
    ahead_ = true;
    if (p.share == share_ && !own_) all_.make_ahead(p.epoch, p.index);  // otherwise it is a lost rank's lease
  }
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
