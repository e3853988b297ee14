// Coordinator: rank 0's part of a parameter server. It hands out the leases, gathers what all ranks say, and knows when
// the run is over and when all may go. No thread and no network: it is told what has happened, and says what follows
// from it to `send`. Times are seconds of any clock. Which of its messages say what: server_messages.h.
#pragma once
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "dist/server/channel.h"
#include "dist/server/work_leases.h"

namespace tandem {

class Coordinator {
 public:
  // text: null where there is none.
  using Send = std::function<void(int to, const MessageHeader& header, std::shared_ptr<const std::string> text)>;
  Coordinator(int ranks, Send send) : send_(std::move(send)), ranks_(std::size_t(ranks)) {}

  // The first `workers` ranks train. synchronous: they make each step together (bsp). Who has asked for a lease has it
  // now.
  void begin(int workers, bool synchronous, WorkLeases leases);

  void says(int rank, std::uint64_t gathering, std::string text);
  // A lease. Requests ascend, and one that comes again is passed over.
  void wants(int worker, std::uint64_t request);
  // True: it was not done before. waited: seconds that its worker waited for others, which say nothing of its speed.
  bool done(std::int64_t lease, double now, double waited = 0);
  void again(std::int64_t lease, double now);  // its push was dropped
  void leaves(int worker);                     // draws no more; what it has is drawn again
  void stop();
  void says_bye(int rank);
  void lost(int rank, double now), returned(int rank);
  // A worker's lease is done: the seconds since it was lost, where this is the first one since then; otherwise 0.
  double back_after(int worker, double now) {
    return of(worker).lost_at > 0 ? now - std::exchange(of(worker).lost_at, 0) : 0;
  }
  // What that rank's training thread waits for; empty: it works.
  void waits_for(int rank, std::string waits_for, double now);
  struct Waiting {
    std::string waits = {}, works = {};  // "rank 1 for a lease; rank 2 for …", "rank 0"
    double since = 0;                    // nothing of that has changed, and no lease was done
  };
  Waiting waiting(const std::function<std::string(int)>& name) const;

  std::int64_t leases_done() const { return leases_.count_done(); }

 private:
  struct Rank {
    bool lives = true;
    bool waits = false;      // for a lease
    bool told_none = false;  // that there is none for it now
    bool left = false, bye = false;
    std::uint64_t request = 0;       // its last
    std::string waits_for = {};      // what it waits for; empty: it works
    double done_at = 0;              // when its last lease was
    double lost_at = 0;              // and it has done no lease since; 0: it was not
    std::deque<double> speeds = {};  // leases a second, of the last few times
  };
  struct Gathering {
    std::map<int, std::string> texts;
    std::set<int> told;     // who has heard all
    bool complete = false;  // once all who lived had said something
  };
  Rank& of(int rank) { return ranks_[std::size_t(rank)]; }
  int count() const { return int(ranks_.size()); }
  void hand_out();
  double share(int worker) const;  // its speed, as a part of the fastest worker's
  void tell_over(int rank), count_byes();
  void answer(std::uint64_t gathering);

  Send send_;
  std::vector<Rank> ranks_;
  int workers_ = 0;
  bool begun_ = false, synchronous_ = false, stop_asked_ = false;
  bool over_told_ = false, end_told_ = false;
  double changed_ = 0;  // when a rank began to wait or to work, or a lease was done
  WorkLeases leases_;
  // None is forgotten: who comes back asks for all of them, from the first.
  std::map<std::uint64_t, Gathering> gatherings_;
};

}  // namespace tandem
