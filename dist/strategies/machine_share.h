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
#include <array>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/error.h"
#include "dist/collectives/communicator.h"
#include "dist/job/membership.h"
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
  // Returns the leader's.
  std::array<std::int64_t, 2> of_leader(std::array<std::int64_t, 2> numbers) {
    on_host_->broadcast({numbers.data(), sizeof numbers, DType::u8}, 0).wait();
    return numbers;
  }
  // The texts of this machine's ranks.
  std::vector<std::string> gather(const std::string& mine) { return gather_texts(*on_host_, mine); }
  // The texts of all ranks of the job, in the order of ranks. among_leaders: called by the leader; it gathers its
  // argument over the leaders of all machines.
  using Gather = std::function<std::vector<std::string>(const std::string& mine)>;
  std::vector<std::string> gather(const std::string& mine, const Gather& among_leaders) {
    if (size() == 1) return among_leaders(mine);
    const auto here = gather(bundle({std::to_string(rank()), mine}));
    const std::string everywhere = gather(leads() ? bundle(among_leaders(bundle(here))) : "")[0];
    std::vector<std::string> all(static_cast<std::size_t>(job_size_));
    for (const std::string& machine : unbundle(everywhere)) {
      if (machine.empty()) continue;  // the machine is lost
      for (const std::string& text : unbundle(machine)) {
        const auto sent = unbundle(text);
        all[std::stoul(sent[0])] = sent[1];
      }
    }
    return all;
  }

  // Numbers of one step, and their sums over a machine.
  struct Step {
    double not_finite = 0, stops = 0, samples = 0;
    double next_lease = 0;  // the leader's next lease plus 1; 0: not known yet
    MetricSums sums = {};
  };
  void sum(Step& step) {
    double* const numbers[] = {&step.not_finite, &step.stops,        &step.samples,     &step.next_lease,
                               &step.sums.loss,  &step.sums.correct, &step.sums.samples};
    std::vector<double> all;
    for (const double* n : numbers) all.push_back(*n);
    on_host_->all_reduce(buffer(all)).wait();
    for (std::size_t i = 0; i < all.size(); i++) *numbers[i] = all[i];
  }

 private:
  std::unique_ptr<Communicator> on_host_;
  std::vector<int> ranks_;
  int job_size_;
};

}  // namespace tandem
