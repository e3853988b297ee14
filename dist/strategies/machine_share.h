// A worker of the parameter server: one rank, or a machine with all its ranks. The ranks of a machine train shares of
// one batch and sum their gradients on the machine. Each rank then has a part of the sum: its piece of the replicated
// parameters, and its slices of the layers that are divided over the machine's ranks. It pushes its part to the servers
// of its lane, which are the ranks with its place on the other machines, and receives the part's new weights from them
// (served_vectors.h). So a gradient crosses the network once per machine and not once per rank, and all ranks of a
// machine share this work (after the patent CN108460457A; the division into pieces is ours).
//
// Threads: the training thread. All ranks of a machine call the same functions in the same order. Each call waits for
// all of them, unless stated otherwise. Throws CommunicationError if one of them is lost: a machine leaves the job as a
// whole.
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "dist/collectives/communicator.h"
#include "dist/job/membership.h"
#include "dist/server/server.h"
#include "dist/strategies/replicas.h"
#include "layers/train/strategy.h"

namespace tandem {

class MachineShare {
 public:
  // on_host: the ranks of this machine. ranks: their numbers in the job. job_size: the number of the job's ranks.
  MachineShare(std::unique_ptr<Communicator> on_host, std::vector<int> ranks, int job_size)
      : on_host_(std::move(on_host)), ranks_(std::move(ranks)), job_size_(job_size) {
    require(int(ranks_.size()) == size(), "a machine of ", size(), " ranks, of which ", ranks_.size(), " are named");
  }

  Communicator& on_host() { return *on_host_; }
  int size() const { return on_host_->size(); }
  int place() const { return on_host_->rank(); }  // of this rank on the machine
  bool leads() const { return place() == 0; }     // leases the machine's batches
  int rank() const { return ranks_[std::size_t(place())]; }
  int job_size() const { return job_size_; }
  bool holds(int rank) const { return std::find(ranks_.begin(), ranks_.end(), rank) != ranks_.end(); }
  // The texts of this machine's ranks.
  std::vector<std::string> gather(const std::string& mine) { return gather_texts(*on_host_, mine); }
  // The texts of all ranks of the job, in the order of ranks; of a lost machine empty ones. in_lane: gathers its
  // argument over the ranks with this place on their machines.
  template <class Gather>
  std::vector<std::string> gather(const std::string& mine, const Gather& in_lane) {
    std::vector<std::string> all(static_cast<std::size_t>(job_size_));
    for (const std::string& lane : gather(bundle(in_lane(bundle({std::to_string(rank()), mine})))))
      for (const std::string& text : unbundle(lane)) {
        if (text.empty()) continue;
        const auto sent = unbundle(text);
        all[std::stoul(sent[0])] = sent[1];
      }
    return all;
  }

  // Numbers of one step, and their sums over a machine.
  struct Step {
    double not_finite = 0, stops = 0, samples = 0;
    double next_lease = 0;  // the leader's next lease plus 1; 0: not known yet
    MetricSums sums = {};
  };
  void sum(Step& s) {
    std::vector<double> all{s.not_finite, s.stops,        s.samples,     s.next_lease,
                            s.sums.loss,  s.sums.correct, s.sums.samples};
    on_host_->all_reduce(buffer(all)).wait();
    s = {all[0], all[1], all[2], all[3], {.loss = all[4], .correct = all[5], .samples = all[6]}};
  }

 private:
  std::unique_ptr<Communicator> on_host_;
  std::vector<int> ranks_;
  int job_size_;
};

// The leases that a worker draws during fit(), and the number of the run's steps that results from them. On a machine
// with several ranks, the first rank draws and sends the leases to the others. The servers of the other ranks' lanes
// have an unlimited number of leases, one for each push. draw() and share_done() wait for all ranks of the machine.
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
    const std::int64_t lease = share_done(follows() ? run_is_over : node_.lease(asked_to_stop).value_or(run_is_over));
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
    std::int64_t numbers[] = {number, node_.leases_done()};
    machine_.on_host().broadcast({numbers, sizeof numbers, DType::u8}, 0).wait();
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
