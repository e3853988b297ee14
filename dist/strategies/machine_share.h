// A machine as one worker of the parameter server. The ranks of a machine train shares of one batch and sum their
// gradients on the machine. Each of them then has a part of the sum: its piece of the replicated parameters, and its
// slices of the layers that are cut over the machine's ranks. It pushes its part to the servers of its lane, which are
// the ranks that have its place on the other machines, and takes the new weights of the part from them. So a gradient
// crosses the network once for each machine and not for each rank, and all ranks of a machine carry it (after the
// patent CN108460457A; the division into pieces is ours).
//
// Threads: the training thread. All ranks of a machine call the same functions in the same order, and each call waits
// for all of them, unless it says otherwise. Throws CommunicationError when one of them is lost: a machine leaves the
// job as a whole.
#pragma once
#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dist/collectives/communicator.h"
#include "dist/strategies/on_host.h"
#include "layers/optim/optimizer.h"
#include "layers/train/strategy.h"

namespace tandem {

class MachineShare {
 public:
  // on_host: the ranks of this machine. ranks: which of the job's they are. job_size: the number of the job's ranks.
  MachineShare(std::unique_ptr<Communicator> on_host, std::vector<int> ranks, int job_size);

  int size() const { return on_host_->size(); }
  int place() const { return on_host_->rank(); }  // of this rank on the machine
  bool leads() const { return place() == 0; }     // leases the machine's batches
  int rank() const { return ranks_[std::size_t(place())]; }
  int job_size() const { return job_size_; }
  bool holds(int rank) const { return std::find(ranks_.begin(), ranks_.end(), rank) != ranks_.end(); }
  // Where a machine's ranks share memory, in it; null: any memory will do.
  std::shared_ptr<void> allocate(std::size_t bytes) { return on_host_->allocate(bytes); }
  void broadcast(Buffer data) { on_host_->broadcast(data, 0).wait(); }    // the leader's
  std::array<std::int64_t, 2> told(std::array<std::int64_t, 2> numbers);  // the leader's
  // The texts of this machine's ranks.
  std::vector<std::string> gather(const std::string& mine);
  // The texts of all ranks of the job, in the order of ranks. among_leaders: called by the leader; its argument's of
  // all machines.
  using Gather = std::function<std::vector<std::string>(const std::string& mine)>;
  std::vector<std::string> gather(const std::string& mine, const Gather& among_leaders);

  // Gives all ranks the leader's replicated values, and finds which ranges are this rank's part.
  void begin(FlatParameters& flat);
  std::int64_t part_numel() const;
  // Elements of the part, one range after the other, in `memory`. Waits for nobody, like the next two.
  Buffer pack(Buffer vector, std::vector<std::byte>& memory) const;
  Buffer room(DType dtype, std::vector<std::byte>& memory) const;          // for the part, with anything in it
  std::vector<float> pack_scales(const std::vector<float>& scales) const;  // of each 64 elements
  // The part to its ranges of the vector, and of the replicated ranges the other ranks' parts to theirs.
  void unpack(const std::vector<std::byte>& part, Buffer vector);

  // What is counted over a machine in a step.
  struct Step {
    double not_finite = 0, stops = 0, samples = 0;
    double next_lease = 0;  // the leader's, plus 1; 0: it is not known yet
    MetricSums sums = {};
  };
  // After backward: sums `step` and the gradients over the machine. The part of the gradients becomes what is pushed
  // (clipped by the norm of the whole, with weight decay); the rest of them is undefined. False: something was not
  // finite on some rank.
  bool combine(Step& step, OnHost& gradients, FlatParameters& flat, Optimizer& optimizer);

 private:
  Buffer replicated(Buffer vector) const { return {vector.data, cuts_.back(), vector.dtype}; }

  std::unique_ptr<Communicator> on_host_;
  const std::vector<int> ranks_;
  const int job_size_;
  Cuts cuts_;                  // of the replicated range, which begins at 0
  std::vector<Range> ranges_;  // this rank's part: a piece of it, and the slices
};

}  // namespace tandem
