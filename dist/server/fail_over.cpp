#include "dist/server/fail_over.h"

#include <utility>

namespace tandem {

FailOvers::FailOvers(const ServerLayout& layout, SendQueue& send_queue)
    : layout_(layout),
      send_queue_(send_queue),
      fail_overs_(std::size_t(layout.shards())),
      snapshots_(std::size_t(layout.shards())) {}

void FailOvers::begin(int s) { fail_overs_[std::size_t(s)].under_way = true; }

void FailOvers::lost(int rank) {
  for (int s = 0; s < layout_.shards(); s++) {
    FailOver& a = fail_overs_[std::size_t(s)];
    a.offers.erase(rank);
    if (a.from == rank) a.from = -1, a.arrived = 0;  // another copy is chosen
    choose(s);
    if (Snapshot& p = snapshots_[std::size_t(s)]; p.from == rank) p.number = 0;  // the rest of it will not arrive
  }
}

void FailOvers::offered(int from, const MessageHeader& n, std::vector<ExchangeId> applied) {
  const int s = int(n[word::shard]);
  FailOver& a = fail_overs_[std::size_t(s)];
  // A rejoined rank sends offers to all owners; most owners need none.
  if (!a.under_way && layout_.owner[std::size_t(s)] == send_queue_.rank()) return;
  a.offers[from] = {n[word::version] > 0, {n[word::version] - 1, std::int64_t(n[word::pushes]), std::move(applied)}};
  choose(s);
}

// Chooses once all live ranks have sent offers, including rejoined ranks: these may have received the newest answer.
void FailOvers::choose(int s) {
  FailOver& a = fail_overs_[std::size_t(s)];
  if (!a.under_way || a.from >= 0) return;
  const std::vector<bool> living = send_queue_.living();
  const Offer* best = nullptr;
  int from = -1;
  for (int r = 0; r < layout_.ranks; r++) {
    if (!living[std::size_t(r)]) continue;
    const auto offer = a.offers.find(r);
    if (offer == a.offers.end()) return;
    if (offer->second.has && (!best || offer->second.state.version > best->state.version)) {
      best = &offer->second;
      from = r;
    }
  }
  if (!best) fail("nobody has a copy of what ", send_queue_.where(send_queue_.rank()), " is to go on with");
  a.from = from;
  a.values.resize(layout_.bytes(layout_.length(s)));
  if (a.values.empty()) return finish(s);
  send_queue_.send(from, header(What::copy_wanted, s));
}

void FailOvers::finish(int s) {
  FailOver a = std::exchange(fail_overs_[std::size_t(s)], {});
  finished_.push_back({s, std::move(a.offers[a.from].state), std::move(a.values), snapshots_[std::size_t(s)].kept});
}
std::vector<FailOvers::TakenOver> FailOvers::finished() { return std::exchange(finished_, {}); }

std::optional<std::span<std::byte>> FailOvers::place(int from, const MessageHeader& n, std::size_t bytes) {
  const std::size_t at = layout_.bytes(std::int64_t(n[word::first]));
  if (what_of(n) == What::copy_part) {
    FailOver& a = fail_overs_[n[word::shard]];
    if (!a.under_way || a.from != from) return {};
    return std::span(a.values).subspan(at, bytes);
  }
  Snapshot& p = snapshots_[n[word::shard]];
  // A new snapshot begins, and the incomplete previous one is discarded.
  if (p.from != from || p.number != n[word::number]) {
    // One vector and two for each worker: no rule keeps more.
    if (n[word::vectors] > 1 + 2 * std::size_t(layout_.workers())) return std::span<std::byte>();
    const std::int64_t length = layout_.length(int(n[word::shard]));
    p.from = from;
    p.number = n[word::number];
    p.coming.assign(n[word::vectors], std::vector<std::byte>(layout_.bytes(length)));
    p.missing = std::int64_t(p.coming.size()) * length;
  }
  if (n[word::vector] >= p.coming.size()) return std::span<std::byte>();
  return std::span(p.coming[n[word::vector]]).subspan(at, bytes);
}

void FailOvers::copy_part(int from, const MessageHeader& n, std::int64_t numel) {
  FailOver& a = fail_overs_[n[word::shard]];
  if (!a.under_way || a.from != from) return;
  if ((a.arrived += numel) == layout_.length(int(n[word::shard]))) finish(int(n[word::shard]));
}

void FailOvers::snapshot_part(const MessageHeader& n, std::int64_t numel) {
  Snapshot& p = snapshots_[n[word::shard]];
  if ((p.missing -= numel) > 0) return;
  p.kept.swap(p.coming);
  p.coming.clear();
  p.number = 0;
}

}  // namespace tandem
