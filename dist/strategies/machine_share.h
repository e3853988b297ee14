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
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "dist/collectives/on_devices.h"
#include "dist/job/membership.h"
#include "dist/server/server.h"
#include "dist/strategies/replicas.h"
#include "layers/train/strategy.h"

namespace tandem {

class MachineShare : public DataAndFlags {
 public:
  // on_host: the ranks of this machine. ranks: their numbers in the job. job_size: the number of the job's ranks.
  MachineShare(std::unique_ptr<Communicator> on_host, std::vector<int> ranks, int job_size)
      : DataAndFlags(std::move(on_host)), ranks_(std::move(ranks)), job_size_(job_size) {
    require(int(ranks_.size()) == size(), "a machine of ", size(), " ranks, of which ", ranks_.size(), " are named");
  }

  int size() const { return flags().size(); }
  int place() const { return flags().rank(); }  // of this rank on the machine
  bool leads() const { return place() == 0; }   // leases the machine's batches
  int rank() const { return ranks_[std::size_t(place())]; }
  int job_size() const { return job_size_; }
  bool holds(int rank) const { return std::find(ranks_.begin(), ranks_.end(), rank) != ranks_.end(); }
  // The texts of this machine's ranks.
  std::vector<std::string> gather(const std::string& mine) { return gather_texts(flags(), mine); }
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
    flags().all_reduce(buffer(all)).wait();
    s = {all[0], all[1], all[2], all[3], {.loss = all[4], .correct = all[5], .samples = all[6]}};
  }

 private:
  std::vector<int> ranks_;
  int job_size_;
};

}  // namespace tandem
