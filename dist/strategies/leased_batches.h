// The batches of the leases that a worker draws, as a BatchSource for fit(), and the number of the run's steps that
// results from them. A lease is one share of a step's batches (work_leases.h). The loader's thread prepares the batch
// after the current one. So the next lease is drawn while the current one is trained.
//
// On a machine with several ranks, the first rank draws and sends the leases to the others. The servers of the other
// ranks' lanes have an unlimited number of leases, one for each push. next() and share_done() wait for all ranks of the
// machine.
#pragma once
#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "dist/strategies/machine_share.h"
#include "layers/train/own_part.h"

namespace tandem {

class LeasedBatches : public BatchSource {
 public:
  struct Options {
    int shares = 1;                                 // leases per step
    int accumulate = 1;                             // batches per lease
    bool synchronous = false;                       // all workers draw together
    std::function<void(std::int64_t first)> start;  // an epoch begins with that lease
    std::function<bool()> asked_to_stop;            // then this rank ends the run: no worker draws more leases
  };
  // `all` may be a worker's own part: its batches then take the place of those that the leases number. All three must
  // outlive this object.
  LeasedBatches(BatchSource& all, ServerNode& node, MachineShare& machine, Options options)
      : all_(all),
        own_(dynamic_cast<OwnPart*>(&all)),
        node_(node),
        machine_(machine),
        options_(std::move(options)),
        shares_(options_.shares),
        part_(machine.place()),
        parts_(machine.size()) {
    all_.share(int(part_), int(shares_ * parts_));
    per_epoch_ = all_.batches_per_epoch();
  }
  // The leases for the servers: from `first` to `end`, at most `most` at once.
  WorkLeases leases(std::int64_t first, std::int64_t end, std::int64_t most) {
    first_ = first;
    end_ = end;
    return machine_.leads() ? WorkLeases(std::min(first, end), end, most, leases_per_epoch()) : WorkLeases::endless();
  }

  void share(int, int) override {}
  bool grows_with_ranks() const override { return all_.grows_with_ranks(); }
  std::int64_t batches_per_epoch() const override { return per_epoch_; }
  std::int64_t pictures_per_epoch() const override { return all_.pictures_per_epoch(); }
  Parts parts(int workers) const override { return all_.parts(workers); }
  void start(std::int64_t epoch, std::int64_t first) override {
    epoch_ = epoch;
    if (own_ && !std::exchange(begun_, true)) own_->start(epoch, first);
    options_.start(epoch * leases_per_epoch() + (first + options_.accumulate - 1) / options_.accumulate * shares_);
  }
  bool next(Batch& batch) override {
    if (!lease_ && !over_) draw();
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
    const auto lease = lease_ ? lease_ : coming();
    if (!lease) return;
    const Place p = place(*lease, lease_ ? next_ : 0);
    ahead_ = true;
    if (p.share == share_ && !own_) all_.make_ahead(p.epoch, p.index);  // another share: a lost rank's lease
  }
  std::int64_t leases_per_epoch() const {
    return (per_epoch_ + options_.accumulate - 1) / options_.accumulate * shares_;
  }
  // The epoch of the next batch. Nothing: it is not drawn yet, or there is none.
  std::optional<std::int64_t> epoch() const {
    return lease_ ? std::optional(*lease_ / leases_per_epoch()) : std::nullopt;
  }
  bool over() const { return over_; }                                 // the run: there are no more leases
  bool lease_ends() const { return !lease_; }                         // the current batch is its last
  std::int64_t take_samples() { return std::exchange(samples_, 0); }  // in the batches since the last call

  // Sends the number of done leases from the leader to all ranks of a machine, so that all count the same steps.
  // Returns the leader's `number`.
  std::int64_t share_done(std::int64_t number = 0) {
    std::int64_t numbers[] = {number, node_.leases_done()};
    machine_.flags().broadcast({numbers, sizeof numbers, DType::u8}, 0).wait();
    done_ = numbers[1];
    return numbers[0];
  }
  // Completed steps of the run. known: the number that this rank has counted.
  std::int64_t steps(std::int64_t known) const {
    if (parts_ == 1) return (first_ + node_.leases_done()) / shares_;
    return std::max(known, (first_ + done_) / shares_);  // known: with this machine's unreported step
  }
  // The learning rate as a function of a server's applied pushes, given the rate as a function of the run's steps.
  std::function<double(std::int64_t pushes)> of_pushes(std::function<double(double)> rate) const {
    return [rate = std::move(rate), first = first_, shares = shares_](std::int64_t pushes) {
      return rate(double((first + pushes) / shares));
    };
  }

  // The leader sends its next lease with the sums of a step over the machine's ranks.
  void announce(MachineShare::Step& step) const {
    if (const auto next = node_.next_lease(); next && machine_.leads()) step.next_lease = double(*next + 1);
  }
  void receive(const MachineShare::Step& step) {
    if (step.next_lease > 0) announced_ = std::int64_t(step.next_lease) - 1;
    look_ahead();
  }

 private:
  static constexpr std::int64_t run_is_over = -1;
  struct Place {
    std::int64_t share, epoch, index;
  };
  Place place(std::int64_t lease, std::int64_t k) const {  // of the lease's k-th batch
    return {lease % shares_, lease / leases_per_epoch(),
            lease % leases_per_epoch() / shares_ * options_.accumulate + k};
  }
  // The lease that draw() will return, if it is known; does not wait. With bsp it is predicted, and wrong only after a
  // loss.
  std::optional<std::int64_t> coming() const {
    if (!options_.synchronous) return machine_.leads() ? node_.next_lease() : announced_;
    const std::int64_t next = last_ + shares_;
    return next < end_ ? std::optional(next) : std::nullopt;
  }
  // Waits for the next lease. Throws Error if the other machines have ended earlier.
  void draw() {
    const auto mine = machine_.leads() ? node_.lease(options_.asked_to_stop) : std::nullopt;
    const std::int64_t lease = share_done(mine.value_or(run_is_over));
    announced_ = {};
    over_ = lease == run_is_over;
    if (over_) return;
    if (!machine_.leads() && !node_.lease()) fail("the other machines have ended");
    lease_ = last_ = lease;
    next_ = 0;
    batches_ = options_.accumulate * node_.lease_count();
  }

  BatchSource& all_;
  OwnPart* own_;  // all_, if it is one
  ServerNode& node_;
  MachineShare& machine_;
  const Options options_;
  const std::int64_t shares_, part_, parts_;  // this rank trains part `part_` of `parts_` of a lease
  std::int64_t per_epoch_ = 0, epoch_ = 0, share_ = 0, samples_ = 0;
  std::int64_t first_ = 0, end_ = 0, last_ = 0;    // of the run's leases; last_: the last drawn lease
  std::int64_t done_ = 0;                          // leases that are done, as received from the leader
  std::optional<std::int64_t> lease_, announced_;  // announced_: the next lease, as received from the leader
  std::int64_t next_ = 0, batches_ = 1;            // counted in batches of the lease
  bool over_ = false;
  bool ahead_ = false;  // the next batch is being prepared
  bool begun_ = false;  // the own part was started; it never ends
};

}  // namespace tandem
