// Coordinator: rank 0's part of a parameter server. It hands out the leases, gathers the texts of all ranks, and
// determines when the run is over and when the ranks may exit. Its functions are called for each event, and it sends
// the resulting messages. It has no thread and no clock: times are seconds of any clock. server_messages.h defines its
// messages.
#pragma once
#include <algorithm>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "dist/job/membership.h"
#include "dist/server/channel.h"
#include "dist/server/server_messages.h"
#include "dist/server/work_leases.h"

namespace tandem {

class Coordinator {
 public:
  explicit Coordinator(Channel& channel) : channel_(channel), ranks_(std::size_t(channel.size())) {}

  // The first `workers` ranks train. synchronous: they make each step together (bsp). Lease requests that arrived
  // before this call are answered now.
  void begin(int workers, bool synchronous, WorkLeases leases) {
    workers_ = workers;
    synchronous_ = synchronous;
    leases_ = std::move(leases);
    if (stop_asked_) leases_.stop();  // by a rank that began before rank 0
    begun_ = true;
    hand_out();
  }

  void says(int rank, std::uint64_t gathering, std::string text) {
    gatherings_[gathering].texts[rank] = std::move(text);
    answer(gathering);
  }
  // Requests a lease. Request numbers increase; a repeated request is ignored.
  void wants(int worker, std::uint64_t request) {
    if (request <= of(worker).request) return;
    of(worker).request = request;
    if (over_sent_) return send_over(worker);  // it rejoined after that message was sent
    of(worker).waits = true;
    hand_out();
  }
  // True if the lease was not done before. waited: seconds that the worker waited for others; they are not part of its
  // speed.
  bool done(std::int64_t lease, double now, double waited = 0) {
    if (const auto held = leases_.held(lease)) {
      Rank& worker = of(held->worker);
      const double worked = now - worker.done_at - waited;
      if (worker.done_at > 0 && worked > 0) worker.speeds.push_back(double(held->count) / worked);
      if (worker.speeds.size() > 3) worker.speeds.pop_front();
      worker.done_at = now;
    }
    const bool counts = leases_.done(lease);
    changed_ = now;
    hand_out();
    return counts;
  }
  // Its push was dropped.
  void again(std::int64_t lease, double now) {
    leases_.again(lease);
    changed_ = now;
    hand_out();
  }
  // Draws no more leases; its unfinished ones are drawn again.
  void leaves(int worker) {
    of(worker).left = true;
    of(worker).waits = false;
    leases_.lost(worker);
    hand_out();
  }
  void stop() {
    stop_asked_ = true;
    leases_.stop();
    hand_out();
  }
  void says_bye(int rank) {
    if (end_sent_) return send(channel_, rank, message::End{});  // it rejoined after that message was sent
    of(rank).bye = true;
    count_byes();
  }
  void lost(int rank, double now) {
    const double before = of(rank).lost_at;  // if set, it was lost again while it rejoined: it is away since then
    of(rank) = {.lives = false, .lost_at = before > 0 ? before : now};
    changed_ = now;
    if (begun_) {
      leases_.lost(rank);
      hand_out();
      count_byes();
    }
    for (auto& [k, gathering] : gatherings_) {
      gathering.sent.erase(rank);
      gathering.texts.erase(rank);
      answer(k);
    }
  }
  void returned(int rank) { of(rank).lives = true; }
  // Called when a worker's lease is done. Returns the seconds since it was lost if this is its first lease after that,
  // else 0.
  double back_after(int worker, double now) {
    return of(worker).lost_at > 0 ? now - std::exchange(of(worker).lost_at, 0) : 0;
  }
  // The event that this rank's training thread waits for. Empty: the rank works.
  void waits_for(int rank, std::string waits_for, double now) {
    of(rank).waits_for = std::move(waits_for);
    changed_ = now;
  }
  struct Waiting {
    std::string waits = {}, works = {};  // "rank 1 for a lease; rank 2 for …", "rank 0"
    double since = 0;                    // since then no rank has changed its state and no lease was done
  };
  Waiting waiting() const {
    Waiting w{.since = changed_};
    for (int r = 0; r < count(); r++) {
      const Rank& rank = ranks_[std::size_t(r)];
      if (!rank.lives) continue;
      if (rank.waits_for.empty())
        w.works += (w.works.empty() ? "" : ", ") + channel_.where(r);
      else
        w.waits += (w.waits.empty() ? "" : "; ") + channel_.where(r) + " for " + rank.waits_for;
    }
    return w;
  }

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
  void hand_out() {
    if (!begun_) return;
    int may_want = 0, wait = 0;
    for (int m = 0; m < workers_; m++) {
      may_want += of(m).lives && !of(m).left;
      wait += of(m).waits;
    }
    // Workers that make a step together draw their leases together: the batches of a step are then the same as on one
    // machine that makes all of them.
    if (synchronous_ && wait < may_want) return;
    const auto reply = [&](int m, std::int64_t lease, std::int64_t count) {
      send(channel_, m, message::LeaseIs{of(m).request, lease, count, leases_done()});
    };
    for (int m = 0; m < workers_; m++) {
      Rank& r = of(m);
      if (!r.waits) continue;
      if (const auto lease = leases_.draw(m, share(m))) {
        reply(m, *lease, leases_.held(*lease)->count);
        r.waits = r.sent_none = false;
      } else if (!std::exchange(r.sent_none, true)) {
        reply(m, 0, 0);  // it continues to wait; the servers need not wait for its push
      }
    }
    if (over_sent_ || (!leases_.over() && may_want > 0)) return;
    over_sent_ = true;
    for (int r = 0; r < count(); r++)
      if (of(r).lives) send_over(r);
    count_byes();
  }
  // The speed of a worker: the median of the last three, so that an occasional evaluation or checkpoint has no effect.
  static double speed_of(const std::deque<double>& last) {
    if (last.empty()) return 0;
    std::vector<double> sorted(last.begin(), last.end());
    std::ranges::sort(sorted);
    return sorted[sorted.size() / 2];
  }
  // Its speed divided by the fastest worker's.
  double share(int worker) const {
    double fastest = 0;
    for (const Rank& r : ranks_)
      if (r.lives && !r.left) fastest = std::max(fastest, speed_of(r.speeds));
    const double mine = speed_of(ranks_[std::size_t(worker)].speeds);
    return mine > 0 ? mine / fastest : 1;
  }
  void send_over(int rank) { send(channel_, rank, message::Over{stop_asked_, leases_done()}); }
  void count_byes() {
    if (!over_sent_ || end_sent_) return;
    for (const Rank& r : ranks_)
      if (r.lives && !r.bye) return;
    end_sent_ = true;
    for (int r = 0; r < count(); r++)
      if (of(r).lives) send(channel_, r, message::End{});
  }
  // Sends the texts once all live ranks have sent theirs, or if they once had: a rank that rejoins later sends its text
  // again and receives the existing texts.
  void answer(std::uint64_t k) {
    Gathering& g = gatherings_[k];
    if (!g.complete)
      for (int r = 0; r < count(); r++)
        if (of(r).lives && !g.texts.count(r)) return;
    g.complete = true;
    std::vector<std::string> all;
    for (int r = 0; r < count(); r++) all.push_back(g.texts.count(r) ? g.texts[r] : "");
    for (const auto& [r, _] : g.texts)
      if (of(r).lives && g.sent.insert(r).second) send(channel_, r, message::Heard{k}, bundle(all));
  }

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
