// Job: the ranks that were started together, one of which is this process. It is created from the environment. It
// contains the ranks and their hosts and the control plane, and it creates communicators and channels.
//
//   Job job;                                   // waits for all ranks
//   auto everybody = job.communicator();       // shared memory on a host, UCX between hosts
//   auto here = job.on_host();                 // only the ranks of this host
//   auto lane = job.across_hosts();            // one rank of each host
//
// All ranks make these objects in the same order. Each has its own connections, so different threads may use them at
// the same time, and they remain valid after the Job. A process may have several Jobs.
#pragma once
#include <memory>
#include <vector>

#include "dist/job/environment.h"
#include "dist/job/rendezvous.h"
#include "dist/server/channel.h"

namespace tandem {

class Control;
class Ucx;

struct JobOptions {
  // The job continues when a rank other than 0 is lost. With TANDEM_INCARNATION=1 (2, …) this process rejoins as a lost
  // rank, from any host that reaches rank 0.
  bool goes_on = false;
  Variables variables = process_environment();
};

class Job {
 public:
  // Throws UsageError if a setting is missing, Error if ranks are missing or inconsistent.
  explicit Job(const JobOptions& options = {});

  int rank() const { return place_.rank; }
  int size() const { return place_.size; }

  // Hosts, numbered in the order of their first ranks. Ranks are on one host when they share memory.
  int hosts() const;
  int host(int rank) const { return hosts_[std::size_t(rank)]; }
  std::vector<int> ranks_on(int host) const;
  int local_rank() const;  // this rank's index among the ranks of its host
  // The ranks with this one's local rank, one of each host. Throws UsageError unless all hosts have the same number of
  // ranks.
  std::vector<int> lane() const;

  std::unique_ptr<Communicator> communicator();
  std::unique_ptr<Communicator> on_host();
  // Connects the ranks of lane().
  std::unique_ptr<Communicator> across_hosts();
  // Connects the ranks of `group`, which contains this rank; empty: all ranks. Every rank of the job calls it, each
  // with its own group. In a job that continues without lost ranks, each rank has one channel.
  std::unique_ptr<Channel> channel(std::vector<int> group = {});

 private:
  std::shared_ptr<Ucx> open_ucx() const;
  std::unique_ptr<Communicator> messages();
  const AddressRecord& record(int rank) const;

  Place place_;
  Deadlines deadlines_;
  const bool goes_on_;
  std::vector<int> hosts_{0};  // by rank
  std::shared_ptr<Control> control_;
  // The channel's UCX worker, in a job that continues without lost ranks. The address record contains its address.
  std::shared_ptr<Ucx> ucx_;
};

}  // namespace tandem
