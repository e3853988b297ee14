#include "dist/server/coordinator.h"

#include <algorithm>
#include <utility>

#include "dist/job/membership.h"
#include "dist/server/server_messages.h"

namespace tandem {

void Coordinator::begin(int workers, bool synchronous, WorkLeases leases) {
  workers_ = workers;
  synchronous_ = synchronous;
  leases_ = std::move(leases);
  if (stop_asked_) leases_.stop();  // by a rank that began before rank 0
  begun_ = true;
  hand_out();
}

// ---- leases ---------------------------------------------------------------------------------------------------------
void Coordinator::wants(int worker, std::uint64_t request) {
  if (request <= of(worker).request) return;
  of(worker).request = request;
  if (over_sent_) return send_over(worker);  // it rejoined after that message was sent
  of(worker).waits = true;
  hand_out();
}

// The speed of a worker: the median of the last three, so that an occasional evaluation or checkpoint has no effect.
static double speed_of(const std::deque<double>& last) {
  if (last.empty()) return 0;
  std::vector<double> sorted(last.begin(), last.end());
  std::ranges::sort(sorted);
  return sorted[sorted.size() / 2];
}
double Coordinator::share(int worker) const {
  double fastest = 0;
  for (const Rank& r : ranks_)
    if (r.lives && !r.left) fastest = std::max(fastest, speed_of(r.speeds));
  const double mine = speed_of(ranks_[std::size_t(worker)].speeds);
  return mine > 0 ? mine / fastest : 1;
}

bool Coordinator::done(std::int64_t lease, double now, double waited) {
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

void Coordinator::again(std::int64_t lease, double now) {
  leases_.again(lease);
  changed_ = now;
  hand_out();
}

void Coordinator::leaves(int worker) {
  of(worker).left = true;
  of(worker).waits = false;
  leases_.lost(worker);
  hand_out();
}

void Coordinator::stop() {
  stop_asked_ = true;
  leases_.stop();
  hand_out();
}

// ---- waiting ranks --------------------------------------------------------------------------------------------------
void Coordinator::waits_for(int rank, std::string waits_for, double now) {
  of(rank).waits_for = std::move(waits_for);
  changed_ = now;
}

Coordinator::Waiting Coordinator::waiting() const {
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

void Coordinator::hand_out() {
  if (!begun_) return;
  int may_want = 0, wait = 0;
  for (int m = 0; m < workers_; m++) {
    may_want += of(m).lives && !of(m).left;
    wait += of(m).waits;
  }
  // With bsp all workers of a step draw their leases at the same time, so the batches of a step are the same as on one
  // machine.
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

// ---- the end --------------------------------------------------------------------------------------------------------
void Coordinator::send_over(int rank) { send(channel_, rank, message::Over{stop_asked_, leases_done()}); }

void Coordinator::says_bye(int rank) {
  if (end_sent_) return send(channel_, rank, message::End{});  // it rejoined after that message was sent
  of(rank).bye = true;
  count_byes();
}

void Coordinator::count_byes() {
  if (!over_sent_ || end_sent_) return;
  for (const Rank& r : ranks_)
    if (r.lives && !r.bye) return;
  end_sent_ = true;
  for (int r = 0; r < count(); r++)
    if (of(r).lives) send(channel_, r, message::End{});
}

// ---- losses and rejoins ---------------------------------------------------------------------------------------------
void Coordinator::lost(int rank, double now) {
  const double before = of(rank).lost_at;  // if set: it was lost before, and has done no lease since
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

void Coordinator::returned(int rank) { of(rank).lives = true; }

// ---- texts ----------------------------------------------------------------------------------------------------------
void Coordinator::says(int rank, std::uint64_t gathering, std::string text) {
  gatherings_[gathering].texts[rank] = std::move(text);
  answer(gathering);
}

// Sends the texts once all live ranks have sent theirs, or if they once had: a rank that rejoins later sends its text
// again and receives the existing texts.
void Coordinator::answer(std::uint64_t k) {
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

}  // namespace tandem
