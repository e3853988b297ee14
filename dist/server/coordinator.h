// Coordinator: rank 0's part of a parameter server. It hands out the leases, gathers the texts of all ranks, and
// determines when the run is over and when the ranks may exit. Its functions are called for each event, and it sends
// the resulting messages. It has no thread and no clock: times are seconds of any clock. server_messages.h defines its
// messages.
#pragma once
#include <deque>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "dist/server/channel.h"
#include "dist/server/work_leases.h"

namespace tandem {

class Coordinator {
 public:
  explicit Coordinator(Channel& channel) : channel_(channel), ranks_(std::size_t(channel.size())) {}

  // The first `workers` ranks train. synchronous: they make each step together (bsp). Lease requests that arrived
  // before this call are answered now.
  void begin(int workers, bool synchronous, WorkLeases leases);

  void says(int rank, std::uint64_t gathering, std::string text);
  // Requests a lease. Request numbers increase; a repeated request is ignored.
  void wants(int worker, std::uint64_t request);
  // True if the lease was not done before. waited: seconds that the worker waited for others; they are not part of its
  // speed.
  bool done(std::int64_t lease, double now, double waited = 0);
  void again(std::int64_t lease, double now);  // its push was dropped
  void leaves(int worker);                     // draws no more leases; its unfinished ones are given to others
  void stop();
  void says_bye(int rank);
  void lost(int rank, double now), returned(int rank);
  // Called when a worker's lease is done. Returns the seconds since it was lost if this is its first lease after that,
  // else 0.
  double back_after(int worker, double now) {
    return of(worker).lost_at > 0 ? now - std::exchange(of(worker).lost_at, 0) : 0;
  }
  // The event that this rank's training thread waits for. Empty: the rank works.
  void waits_for(int rank, std::string waits_for, double now);
  struct Waiting {
    std::string waits = {}, works = {};  // "rank 1 for a lease; rank 2 for …", "rank 0"
    double since = 0;                    // since then no rank has changed its state and no lease was done
  };
  Waiting waiting() const;

  std::int64_t leases_done() const { return leases_.count_done(); }

 private:
  struct Rank {
    bool lives = true;
    bool waits = false;      // for a lease
    bool sent_none = false;  // it was sent that no lease is available now
    bool left = false, bye = false;
    std::uint64_t request = 0;       // number of its last request
    std::string waits_for = {};      // as in waits_for(); empty: it works
    double done_at = 0;              // when its last lease was done
    double lost_at = 0;              // when it was lost, if it has done no lease since; 0: not lost
    std::deque<double> speeds = {};  // leases per second, for its last few leases
  };
  struct Gathering {
    std::map<int, std::string> texts;
    std::set<int> sent;     // ranks to which all texts were sent
    bool complete = false;  // all live ranks have sent a text
  };
  Rank& of(int rank) { return ranks_[std::size_t(rank)]; }
  int count() const { return int(ranks_.size()); }
  void hand_out();
  double share(int worker) const;  // its speed divided by the fastest worker's
  void send_over(int rank), count_byes();
  void answer(std::uint64_t gathering);

  Channel& channel_;
  std::vector<Rank> ranks_;
  int workers_ = 0;
  bool begun_ = false, synchronous_ = false, stop_asked_ = false;
  bool over_sent_ = false, end_sent_ = false;
  double changed_ = 0;  // when a rank last began to wait or to work, or a lease was done
  WorkLeases leases_;
  // All are kept: a rejoined rank asks for all of them, from the first.
  std::map<std::uint64_t, Gathering> gatherings_;
};

}  // namespace tandem
