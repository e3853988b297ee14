// The leases that a worker draws during fit(), and the number of the run's steps that results from them. On a machine
// with several ranks, the first rank draws and sends the leases to the others (machine_share.h). The servers of the
// other ranks' lanes have an unlimited number of leases, one for each push.
//
// Threads: the training thread. A machine's ranks make the same calls in the same order; draw() and share_done() wait
// for all of them.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>

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
  WorkLeases begin(std::int64_t first, std::int64_t end, std::int64_t most, std::int64_t per_epoch);
  // Waits. Nothing: the run is over. Throws Error if the other machines have ended earlier.
  std::optional<std::int64_t> draw(const std::function<bool()>& asked_to_stop);
  // The lease that draw() will return, if it is known. With bsp it is predicted, and wrong only after a loss.
  std::optional<std::int64_t> coming() const;
  // Sends the number of done leases from the leader to all ranks of a machine, so that all count the same steps.
  // Returns the leader's `number`.
  std::int64_t share_done(std::int64_t number = 0);
  // Completed steps of the run. known: the number that this rank has counted.
  std::int64_t steps(std::int64_t known) const;
  // The learning rate as a function of a server's applied pushes, given the rate as a function of the run's steps.
  std::function<double(std::int64_t pushes)> of_pushes(std::function<double(double step)> rate) const;

  // The leader sends its next lease with the sums of a step over the machine's ranks.
  void announce(MachineShare::Step& step) const;
  void receive(const MachineShare::Step& step);

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
