#include "dist/server/shard_server.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "dist/collectives/algorithms.h"
#include "dist/job/frames.h"

namespace tandem {
ShardServer::ShardServer(const ServerLayout& layout, Channel& channel, std::vector<RuleBlock> blocks)
    : layout_(layout),
      channel_(channel),
      blocks_(std::move(blocks)),
      rule_(make_rule(layout.options.how.rule)),
      // With bsp the statistics of a step are already pushed as one mean.
      averaging_(averaging_rule(layout.options.how.kind == Asynchrony::Kind::bsp ? 1.0 : 1.0 / layout.workers())),
      host_(reference_backend(1)),
      others_(std::make_shared<int>()),
      shards_(std::size_t(layout.shards())) {
  for (std::size_t s = 0; s < shards_.size(); s++) {
    shards_[s].clients.resize(std::size_t(layout.workers()));
    // Rank 0 sends initial values. For a rejoined process it sends none: other ranks have its shards now.
    if (layout.owner[s] == channel.rank() && channel.incarnation() == 0) shards_[s].copy_from = 0;
  }
}
ShardServer::~ShardServer() = default;

const ShardService* ShardServer::first() const {
  for (const Held& h : shards_)
    if (h.service) return h.service.get();
  return nullptr;
}

// ---- pushes and pulls -----------------------------------------------------------------------------------------------
// False: the exchange was abandoned. Its worker has continued with a higher number.
bool ShardServer::begins(Client& c, ExchangeId exchange) {
  if (exchange > c.exchange) {
    c.exchange = exchange;
    c.arrived = 0;
    c.samples.reset();
  }
  return exchange == c.exchange;
}

std::optional<std::span<std::byte>> ShardServer::place(int from, const message::Push& m, std::size_t bytes) {
  Client& c = client(m.shard, from);
  if (!begins(c, m.exchange)) return {};
  const std::int64_t length = layout_.length(int(m.shard));
  const DType type = layout_.pushed_as(int(m.shard));
  if (!c.staged.defined()) c.staged = Tensor(*host_, {length}, layout_.dtype);
  std::span<std::byte> all(static_cast<std::byte*>(c.staged.raw_write()), c.staged.bytes());
  if (type != layout_.dtype) {
    c.narrow.resize(std::size_t(length));
    all = std::as_writable_bytes(std::span(c.narrow));
  }
  require(m.first <= std::uint64_t(length) && bytes <= all.size() - m.first * size_of(type), channel_.where(from),
          " does not train the same model");
  return all.subspan(m.first * size_of(type), bytes);
}

void ShardServer::push(int from, const message::Push& m, std::span<std::byte> bytes, bool shared) {
  Client& c = client(m.shard, from);
  if (!begins(c, m.exchange)) return;
  const std::int64_t length = layout_.length(int(m.shard));
  const auto numel = std::int64_t(bytes.size() / size_of(layout_.pushed_as(int(m.shard))));
  const bool whole = shared && numel == length;  // read in place
  if (!whole) {
    const std::span<std::byte> at = *place(from, m, bytes.size());
    if (at.data() != bytes.data()) std::copy(bytes.begin(), bytes.end(), at.begin());
    if (layout_.pushed_as(int(m.shard)) != layout_.dtype)
      widen(c.staged.write<float>() + m.first, c.narrow.data() + m.first, numel);
  }
  c.arrived += numel;
  if (m.last) c.samples = m.samples;
  if (!c.samples || c.arrived < length) return;
  held(m.shard).service->push(from, m.exchange, whole ? tensor(m.shard, bytes.data()) : c.staged,
                              *std::exchange(c.samples, {}), place_answer(from, m.shard, m.exchange));
  answer(m.shard);
}
void ShardServer::pull(int from, const message::Pull& m) {
  held(m.shard).service->pull(from, m.exchange, place_answer(from, m.shard, m.exchange));
  answer(m.shard);
}
void ShardServer::idle(int from, const message::Idle& m) {
  held(m.shard).service->idle(from, m.exchange, m.pause);
  answer(m.shard);
}

// The memory for the answer to a worker. The answer to its previous exchange stays unchanged where the worker reads it.
Tensor ShardServer::place_answer(int worker, std::uint64_t s, ExchangeId exchange) {
  Client& c = client(s, worker);
  const std::size_t copy = layout_.copy_bytes(int(s));
  if (!c.answers) c.answers = channel_.share(2 * copy);
  const std::size_t half = channel_.reaches(worker) ? exchange & 1 : 0;
  return tensor(s, static_cast<std::byte*>(c.answers.get()) + half * copy);
}

void ShardServer::look_at_clock() {
  for (std::uint64_t s = 0; s < shards_.size(); s++)
    if (serves(s) && held(s).service->due() <= now()) answer(s);
}

void ShardServer::answer(std::uint64_t s) {
  ShardService& service = *held(s).service;
  for (ShardService::Answer& a : service.answers(now())) {
    const std::span<std::byte> copy(static_cast<std::byte*>(a.weights.raw_write()), layout_.copy_bytes(int(s)));
    const auto applied = std::as_bytes(std::span(service.applied()));
    std::copy(applied.begin(), applied.end(), copy.end() - std::ptrdiff_t(applied.size()));
    channel_.send(
        a.worker,
        packed(message::Answer{{s, a.exchange}, service.shard().version(), service.counts().pushes, a.verdict}), copy);
  }
}

void ShardServer::velocity_wanted(int from, std::uint64_t s) {
  const Tensor& velocity = held(s).service->shard().velocity(0);
  const auto* bytes = static_cast<const std::byte*>(velocity.raw());
  send(channel_, from, message::Velocity{{s}}, std::vector(bytes, bytes + velocity.bytes()));
}

// ---- losses and fail-over -------------------------------------------------------------------------------------------
void ShardServer::serve(std::uint64_t s, const Tensor& first) {
  const std::int64_t begin = layout_.begin(int(s)) / 64, end = begin + layout_.length(int(s)) / 64;
  const bool parameters = layout_.of_parameters(int(s));
  ServerOptions options = layout_.options;
  // Statistics are averaged in as they arrive: the mean of a quorum would replace the contributions of the other
  // workers. The statistics of a batch whose gradient is dropped count too.
  if (options.how.kind != Asynchrony::Kind::bsp && !options.how.takes_each() && !parameters) options.how = {};
  held(s).service = std::make_unique<ShardService>(
      parameters ? *rule_ : *averaging_, first, std::vector<RuleBlock>(blocks_.begin() + begin, blocks_.begin() + end),
      layout_.workers(), std::move(options));
  const std::vector<bool> living = channel_.living();
  // No worker waits for a rank that is absent, or may not have rejoined yet, until that rank sends a request here.
  for (int m = 0; m < layout_.workers(); m++)
    if (!living[std::size_t(m)] || returned_.count(m)) held(s).service->lost(m);
}

void ShardServer::take_over(std::uint64_t s) {
  held(s).taking_over = true;
  held(s).copy_from = -1;
  taken_over_++;
}

void ShardServer::offered(int from, const message::Offer& m) {
  // A rejoined rank sends offers to all owners; most owners need none.
  if (!held(m.shard).taking_over && layout_.owner[m.shard] == channel_.rank()) return;
  held(m.shard).offers[from] = m;
  choose(m.shard);
}

// Chooses once all live ranks have sent offers, including rejoined ranks: these may have received the newest answer.
void ShardServer::choose(std::uint64_t s) {
  Held& h = held(s);
  if (!h.taking_over || h.copy_from >= 0) return;
  const std::vector<bool> living = channel_.living();
  const message::Offer* best = nullptr;
  int from = -1;
  for (int r = 0; r < layout_.ranks; r++) {
    if (!living[std::size_t(r)]) continue;
    const auto offer = h.offers.find(r);
    if (offer == h.offers.end()) return;
    if (offer->second.has && (!best || offer->second.version > best->version)) {
      best = &offer->second;
      from = r;
    }
  }
  if (!best) fail("nobody has a copy of what ", channel_.where(channel_.rank()), " is to go on with");
  h.copy_from = from;
  send(channel_, from, message::CopyWanted{{s}});
}

void ShardServer::copied(int from, const message::Copy& m, std::span<std::byte> bytes) {
  Held& h = held(m.shard);
  if (h.service || h.copy_from != from) return;
  const std::size_t copy = layout_.copy_bytes(int(m.shard)), weights = layout_.bytes(layout_.length(int(m.shard)));
  require(bytes.size() == copy || bytes.size() == copy + weights, channel_.where(from),
          " does not train the same model");
  serve(m.shard, tensor(m.shard, bytes.data()));
  h.service->go_on(m.version, m.pushes, numbers_in<ExchangeId>(bytes.first(copy).subspan(weights)));
  Shard& shard = h.service->shard();
  if (bytes.size() > copy) shard.go_on_with(tensor(m.shard, bytes.data() + copy));
  std::vector<Tensor> kept = shard.kept();
  if (!h.snapshot.empty() && h.snapshot.size() == kept.size() * weights)
    for (std::size_t k = 0; k < kept.size(); k++)
      std::memcpy(kept[k].raw_write(), h.snapshot.data() + k * weights, weights);
  h.taking_over = false;
  h.offers.clear();
  answer(m.shard);
}

void ShardServer::lost(int rank) {
  for (std::uint64_t s = 0; s < shards_.size(); s++) {
    Held& h = held(s);
    h.offers.erase(rank);
    if (h.copy_from == rank) h.copy_from = -1;  // another copy is chosen
    choose(s);
    if (rank >= layout_.workers()) continue;
    client(s, rank).arrived = 0;
    client(s, rank).samples.reset();
    if (!h.service) continue;
    h.service->lost(rank);
    answer(s);  // other workers may have waited for it
  }
}
void ShardServer::returned(int rank) {
  if (rank >= layout_.workers()) return;
  returned_.insert(rank);
  for (Held& h : shards_)
    if (h.service) h.service->returned(rank);
}

void ShardServer::snapshot(const message::Snapshot& m, std::span<const std::byte> bytes) {
  held(m.shard).snapshot.assign(bytes.begin(), bytes.end());
}
// Sends no snapshot before the previous one is sent: on a slow network there are fewer snapshots, and no queue.
void ShardServer::send_snapshots(int to) {
  if (to == channel_.rank() || snapshot_under_way()) return;
  const auto all = std::make_shared<std::vector<std::vector<std::byte>>>(shards_.size());
  for (std::uint64_t s = 0; s < shards_.size(); s++) {
    if (!serves(s)) continue;
    for (const Tensor& kept : held(s).service->shard().kept()) {
      const auto* bytes = static_cast<const std::byte*>(kept.raw());
      (*all)[s].insert((*all)[s].end(), bytes, bytes + kept.bytes());
    }
    if (!(*all)[s].empty()) channel_.send(to, packed(message::Snapshot{{s}}), (*all)[s], all);
  }
  snapshot_under_way_ = all;
}

}  // namespace tandem
