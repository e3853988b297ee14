// WorkLeases: assigns batches to workers that do not wait for each other. A lease is the batches of one step: lease t
// of a run with n steps per epoch is step t mod n of epoch t / n. A faster worker draws more leases. When a worker is
// lost, its leases go to others. The run is over when all leases are done, that is, applied by every server. A worker
// that makes several steps between two pushes draws that many consecutive leases at once, all of one epoch. They have
// the number of the first lease and are done together.
#pragma once
#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <utility>

namespace tandem {

class WorkLeases {
 public:
  WorkLeases() = default;  // no leases: over
  // The leases first … end − 1; up to `most` are drawn at once.
  WorkLeases(std::int64_t first, std::int64_t end, std::int64_t most = 1, std::int64_t per_epoch = INT64_MAX)
      : next_(first), end_(end), most_(most), per_epoch_(per_epoch) {}

  static WorkLeases endless() { return {0, INT64_MAX / 2}; }

  // share: draws this fraction of `most` leases, above 0 and up to 1, but at least one. Nothing: all are leased or
  // done, or stop() was called; call again while over() is false.
  std::optional<std::int64_t> draw(int worker, double share = 1) {
    if (stopped_) return {};
    const std::int64_t wanted = std::max<std::int64_t>(1, std::int64_t(share * double(most_)));
    std::int64_t lease, count;
    if (!again_.empty()) {
      auto& [first, number] = again_.front();
      lease = first;
      count = std::min(wanted, number);
      first += count;
      number -= count;
      if (number == 0) again_.pop_front();
    } else if (next_ < end_) {
      lease = next_;
      count = std::min({wanted, end_ - next_, per_epoch_ - next_ % per_epoch_});
      next_ += count;
    } else {
      return {};
    }
    held_by_[lease] = {worker, count};
    return lease;
  }
  struct Held {
    int worker;
    std::int64_t count;  // leases
  };
  // Nothing: the lease is not drawn, or done.
  std::optional<Held> held(std::int64_t lease) const {
    const auto found = held_by_.find(lease);
    return found == held_by_.end() ? std::nullopt : std::optional(found->second);
  }
  // True if it was not done before.
  bool done(std::int64_t lease) {
    const auto found = held_by_.extract(lease);
    if (found) done_ += found.mapped().count;
    return !found.empty();
  }
  // The push of this lease was dropped: the lease is drawn again.
  void again(std::int64_t lease) {
    const auto found = held_by_.extract(lease);
    if (found && !stopped_) again_.push_back({lease, found.mapped().count});
  }
  // The leases of a lost worker are drawn again.
  void lost(int worker) {
    for (const auto& [lease, held] : std::map(held_by_))
      if (held.worker == worker) again(lease);
  }
  void stop() {  // no more leases are drawn
    stopped_ = true;
    again_.clear();
  }
  bool over() const { return held_by_.empty() && again_.empty() && (stopped_ || next_ >= end_); }
  std::int64_t count_done() const { return done_; }

 private:
  std::int64_t next_ = 0, end_ = 0, most_ = 1, per_epoch_ = INT64_MAX, done_ = 0;
  bool stopped_ = false;
  std::deque<std::pair<std::int64_t, std::int64_t>> again_;  // first and number
  std::map<std::int64_t, Held> held_by_;
};

}  // namespace tandem
