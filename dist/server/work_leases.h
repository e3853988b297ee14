// WorkLeases: which worker trains which batches when workers do not wait for each other. A lease is the batches of one step: lease t
// of a run with n steps to an epoch is step t mod n of epoch t / n. A faster worker draws more leases. When a worker is lost, its
// leases go to others. The run is over when all leases are done, that is, applied by every server.
#pragma once
#include <cstdint>
#include <deque>
#include <map>
#include <optional>

namespace tandem {

class WorkLeases {
 public:
  WorkLeases() = default;  // none: over
  // The leases first … end − 1.
  WorkLeases(std::int64_t first, std::int64_t end) : next_(first), end_(end) {}

  // Nothing: all are leased or done, or it was stopped; ask again while it is not over().
  std::optional<std::int64_t> draw(int worker);
  // True when it had not been done before.
  bool done(std::int64_t lease);
  void lost(int worker);       // what it had is drawn again
  void stop() { stopped_ = true, again_.clear(); }  // nothing is drawn any more
  bool over() const { return held_by_.empty() && again_.empty() && (stopped_ || next_ >= end_); }
  std::int64_t count_done() const { return done_; }

 private:
  std::int64_t next_ = 0, end_ = 0, done_ = 0;
  bool stopped_ = false;
  std::deque<std::int64_t> again_;
  std::map<std::int64_t, int> held_by_;  // to which worker
};

}  // namespace tandem
