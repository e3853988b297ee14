// The leases that a worker draws during fit(), and the count of the run's steps that follows from them. Of a machine
// with several ranks the first one draws, and tells the others (machine_share.h). Their lanes' servers lease steps
// without end, one for each push.
//
// Threads: the training thread. A machine's ranks make the same calls in the same order; draw() and tell() wait for all
// of them.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>

#include "dist/server/server.h"
#include "dist/strategies/machine_share.h"

namespace tandem {

class WorkerLeases {
 public:
  // per_step: leases of a step. synchronous: all workers draw together. machine: null where each rank is a worker. Both
  // stay alive.
  WorkerLeases(ServerNode& node, MachineShare* machine, bool synchronous, std::int64_t per_step)
      : node_(node), machine_(machine), synchronous_(synchronous), per_step_(per_step) {}
  bool follows() const { return machine_ && !machine_->leads(); }  // another rank of the machine draws

  static WorkLeases endless() { return WorkLeases(0, INT64_MAX / 2); }
  // What the servers hand out: the leases from `first` to `end`, up to `most` at once, per_epoch in each epoch.
  WorkLeases begin(std::int64_t first, std::int64_t end, std::int64_t most, std::int64_t per_epoch);
  // Waits. Nothing: the run is over. Throws Error where the other machines have ended before.
  std::optional<std::int64_t> draw(const std::function<bool()>& asked_to_stop);
  // What draw() will give, as far as it is known. With bsp it is foreseen, and another one only after a loss.
  std::optional<std::int64_t> coming() const;
  // How many leases are done, from the leader to all ranks of a machine, so that all count the same steps.
  void tell() {
    if (machine_) tell(0);
  }
  // Steps of the run that are made. known: as many as this rank has counted.
  std::int64_t steps(std::int64_t known) const;
  // The learning rate as a function of the pushes that a server has applied, from one of the run's steps.
  std::function<double(std::int64_t pushes)> of_pushes(std::function<double(double step)> rate) const;

  // With what a machine's ranks sum in a step, the leader says which lease comes next.
  void announce(MachineShare::Step& step) const;
  void hear(const MachineShare::Step& step);

 private:
  static constexpr std::int64_t run_is_over = -1;
  std::int64_t tell(std::int64_t number);

  ServerNode& node_;
  MachineShare* machine_;
  const bool synchronous_;
  const std::int64_t per_step_;
  std::int64_t first_ = 0, end_ = 0, last_ = 0;  // last_: drawn
  std::int64_t done_ = 0;                        // as the leader has said
  std::optional<std::int64_t> coming_;           // as the leader has said
};

}  // namespace tandem
