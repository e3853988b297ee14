#include "dist/server/adoptions.h"

#include <utility>

namespace tandem {

Adoptions::Adoptions(const ServerLayout& layout, Post& post, Take take)
    : layout_(layout),
      post_(post),
      take_(std::move(take)),
      adoptions_(std::size_t(layout.shards())),
      snapshots_(std::size_t(layout.shards())) {}

void Adoptions::begin(int s) { adoptions_[std::size_t(s)].under_way = true; }

void Adoptions::lost(int rank) {
  for (int s = 0; s < layout_.shards(); s++) {
    Adoption& a = adoptions_[std::size_t(s)];
    a.offers.erase(rank);
    if (a.from == rank) a.from = -1, a.arrived = 0;  // another one's, then
    choose(s);
    if (Snapshot& p = snapshots_[std::size_t(s)]; p.from == rank) p.number = 0;  // the rest of it does not come
  }
}

void Adoptions::offered(int from, const Note& n, std::vector<ExchangeId> applied) {
  const int s = int(n[word::shard]);
  Adoption& a = adoptions_[std::size_t(s)];
  // Who comes back offers to all owners; most need nothing.
  if (!a.under_way && layout_.owner[std::size_t(s)] == post_.rank()) return;
  a.offers[from] = {n[word::version] > 0, {n[word::version] - 1, std::int64_t(n[word::pushes]), std::move(applied)}};
  choose(s);
}

// Once all who live have said what they have, those too who came back: they may have been answered with more than anybody.
void Adoptions::choose(int s) {
  Adoption& a = adoptions_[std::size_t(s)];
  if (!a.under_way || a.from >= 0) return;
  const std::vector<bool> living = post_.living();
  const Offer* best = nullptr;
  int from = -1;
  for (int r = 0; r < layout_.ranks; r++) {
    if (!living[std::size_t(r)]) continue;
    const auto offer = a.offers.find(r);
    if (offer == a.offers.end()) return;
    if (offer->second.has && (!best || offer->second.state.version > best->state.version)) best = &offer->second, from = r;
  }
  if (!best) fail("nobody has a copy of what ", post_.where(post_.rank()), " is to go on with");
  a.from = from;
  a.values.resize(layout_.bytes(layout_.length(s)));
  if (a.values.empty()) return finish(s);
  post_.send(from, note(What::copy_wanted, s));
}

void Adoptions::finish(int s) {
  Adoption a = std::exchange(adoptions_[std::size_t(s)], {});
  take_({s, std::move(a.offers[a.from].state), std::move(a.values), snapshots_[std::size_t(s)].kept});
}

std::optional<std::span<std::byte>> Adoptions::place(int from, const Note& n, std::size_t bytes) {
  const std::size_t at = layout_.bytes(std::int64_t(n[word::first]));
  if (what_of(n) == What::copy_part) {
    Adoption& a = adoptions_[n[word::shard]];
    if (!a.under_way || a.from != from) return {};
    return std::span(a.values).subspan(at, bytes);
  }
  Snapshot& p = snapshots_[n[word::shard]];
  if (p.from != from || p.number != n[word::number]) {  // a new one begins, and what has come of the one before is of no use
    // One vector, or two for each worker: no rule keeps more.
    if (n[word::vectors] > 1 + 2 * std::size_t(layout_.workers())) return std::span<std::byte>();
    const std::int64_t length = layout_.length(int(n[word::shard]));
    p.from = from, p.number = n[word::number];
    p.coming.assign(n[word::vectors], std::vector<std::byte>(layout_.bytes(length)));
    p.missing = std::int64_t(p.coming.size()) * length;
  }
  if (n[word::vector] >= p.coming.size()) return std::span<std::byte>();
  return std::span(p.coming[n[word::vector]]).subspan(at, bytes);
}

void Adoptions::copy_part(int from, const Note& n, std::int64_t elements) {
  Adoption& a = adoptions_[n[word::shard]];
  if (!a.under_way || a.from != from) return;
  if ((a.arrived += elements) == layout_.length(int(n[word::shard]))) finish(int(n[word::shard]));
}

void Adoptions::snapshot_part(const Note& n, std::int64_t elements) {
  Snapshot& p = snapshots_[n[word::shard]];
  if ((p.missing -= elements) > 0) return;
  p.kept.swap(p.coming);
  p.coming.clear();
  p.number = 0;
}

}  // namespace tandem
