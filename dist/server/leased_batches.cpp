#include "dist/server/leased_batches.h"

#include <cmath>

namespace tandem {

LeasedBatches::LeasedBatches(BatchSource& all, int shares, int accumulate, WorkLeases leases, int part, int parts)
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

void LeasedBatches::start(std::int64_t epoch, std::int64_t first) {
  epoch_ = epoch;
  if (own_ && !std::exchange(begun_, true)) own_->start(epoch, first);
  leases_.start(epoch * leases_per_epoch() + (first + accumulate_ - 1) / accumulate_ * shares_);
}

bool LeasedBatches::next(Batch& batch) {
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
    batch.global = parts_ > 1 ? whole * (share_ + 1) / shares_ - whole * share_ / shares_ : 0;  // pictures of the lease
  const double weight = own_ && shares_ > 1 ? own_->weight() * double(own_->pictures_per_epoch()) / double(whole) : 1;
  samples_ += std::llround(weight * double(batch.size()));  // the weight in the mean of a step of all workers
  if (++next_ == batches_ || p.index + 1 == per_epoch_) lease_.reset();
  ahead_ = false;
  look_ahead();
  return true;
}

void LeasedBatches::look_ahead() {
  if (ahead_) return;
  const auto lease = lease_ ? lease_ : leases_.coming();
  if (!lease) return;
  const Place p = place(*lease, lease_ ? next_ : 0);
  ahead_ = true;
  if (p.share == share_ && !own_) all_.make_ahead(p.epoch, p.index);  // otherwise it is a lost rank's lease
}

}  // namespace tandem
