// The leases that a worker draws during fit(), and the number of the run's steps that results from them. On a machine
// with several ranks, the first rank draws and sends the leases to the others (machine_share.h). The servers of the
// other ranks' lanes have an unlimited number of leases, one for each push.
//
// Threads: the training thread. A machine's ranks make the same calls in the same order; draw() and share_done() wait
// for all of them.
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <utility>

#include "core/error.h"
#include "dist/server/server.h"
#include "dist/strategies/machine_share.h"

namespace tandem {

class WorkerLeases {
 public:
  // per_step: leases per step. synchronous: all workers draw together. Both must outlive this
  // object.
  WorkerLeases(ServerNode& node, MachineShare& machine, bool synchronous, std::int64_t per_step)
      : node_(node), machine_(machine), synchronous_(synchronous), per_step_(per_step) {}
  bool follows() const { return !machine_.leads(); }  // another rank of the machine draws

  static WorkLeases endless() { return WorkLeases(0, INT64_MAX / 2); }
  // The leases for the servers: from `first` to `end`, at most `most` at once, per_epoch in each epoch.
  WorkLeases begin(std::int64_t first, std::int64_t end, std::int64_t most, std::int64_t per_epoch) {
    first_ = first;
    end_ = end;
    return follows() ? endless() : WorkLeases(std::min(first, end), end, most, per_epoch);
  }
  // Waits. Nothing: the run is over. Throws Error if the other machines have ended earlier.
  std::optional<std::int64_t> draw(const std::function<bool()>& asked_to_stop) {
    std::int64_t lease = run_is_over;
    if (!follows()) lease = node_.lease(asked_to_stop).value_or(run_is_over);
    lease = share_done(lease);
    coming_ = {};
    if (lease == run_is_over) return {};
    if (follows() && !node_.lease()) fail("the other machines have ended");
    return last_ = lease;
  }
  // The lease that draw() will return, if it is known. With bsp it is predicted, and wrong only after a loss.
  std::optional<std::int64_t> coming() const {
    if (!synchronous_) return follows() ? coming_ : node_.next_lease();
    const std::int64_t next = last_ + per_step_;
    return next < end_ ? std::optional(next) : std::nullopt;
  }
  // Sends the number of done leases from the leader to all ranks of a machine, so that all count the same steps.
  // Returns the leader's `number`.
  std::int64_t share_done(std::int64_t number = 0) {
    const auto numbers = machine_.of_leader({number, node_.leases_done()});
    done_ = numbers[1];
    return numbers[0];
  }
  // Completed steps of the run. known: the number that this rank has counted.
  std::int64_t steps(std::int64_t known) const {
    if (machine_.size() == 1) return (first_ + node_.leases_done()) / per_step_;
    return std::max(known, (first_ + done_) / per_step_);  // known: with this machine's unreported step
  }
  // The learning rate as a function of a server's applied pushes, given the rate as a function of the run's steps.
  std::function<double(std::int64_t pushes)> of_pushes(std::function<double(double)> rate) const {
    return [rate = std::move(rate), first = first_, per_step = per_step_](std::int64_t pushes) {
      return rate(double((first + pushes) / per_step));
    };
  }

  // The leader sends its next lease with the sums of a step over the machine's ranks.
  void announce(MachineShare::Step& step) const {
    if (const auto next = node_.next_lease(); next && machine_.leads()) step.next_lease = double(*next + 1);
  }
  void receive(const MachineShare::Step& step) {
    if (follows() && step.next_lease > 0) coming_ = std::int64_t(step.next_lease) - 1;
  }

 private:
  static constexpr std::int64_t run_is_over = -1;

  ServerNode& node_;
  MachineShare& machine_;
  const bool synchronous_;
  const std::int64_t per_step_;
  std::int64_t first_ = 0, end_ = 0, last_ = 0;  // last_: the last drawn lease
  std::int64_t done_ = 0;                        // leases that are done, as received from the leader
  std::optional<std::int64_t> coming_;           // as received from the leader
};

}  // namespace tandem
