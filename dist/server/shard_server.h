// ShardServer: the owner's side of the parameter server, for the shards that this rank holds. It stages pushed parts
// until a shard's range is complete and the worker has confirmed the push. Then ShardService applies the push, and the
// owner sends the answers that ShardService returns. Workers of this host push gradients that are read in place, and
// read their answers where the owner computes them. For that each worker has two answers of each shard, which are
// written alternately: the last one stays as it is until the worker has the next one.
//
// When an owner is lost, its successor takes over its shards. Every live rank offers the copy that it last received as
// an answer. The newest copy becomes the shard, so it contains every push that was confirmed to a live worker. Copies
// do not contain the vectors that the rule keeps beside the weights (velocities). Owners send these to their successors
// every few seconds; later changes are lost.
//
// Threads: the member's thread only.
#pragma once
#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "core/backend.h"
#include "dist/collectives/algorithms.h"
#include "dist/job/frames.h"
#include "dist/server/rules.h"
#include "dist/server/server_layout.h"
#include "dist/server/server_messages.h"

namespace tandem {

class ShardServer {
 public:
  // scales: learning-rate factors, one per 64 elements of all shards. Throws UsageError if the rule does not exist.
  ShardServer(const ServerLayout& layout, Channel& channel, std::vector<float> scales)
      : layout_(layout),
        channel_(channel),
        scales_(std::move(scales)),
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
  ~ShardServer() = default;

  bool serves(std::uint64_t s) const { return shards_[s].service != nullptr; }  // it has its weights
  // Of the shards that this rank serves; null: none.
  const ShardService* first() const {
    for (const Held& h : shards_)
      if (h.service) return h.service.get();
    return nullptr;
  }
  std::int64_t taken_over() const { return taken_over_; }  // shards
  // This rank is now layout.owner[s]; its own offer arrives like the others.
  void take_over(std::uint64_t s) {
    held(s).taking_over = true;
    held(s).copy_from = -1;
    taken_over_++;
  }
  void lost(int rank) {
    for (std::uint64_t s = 0; s < shards_.size(); s++) {
      Held& h = held(s);
      h.offers.erase(rank);
      if (h.copy_from == rank) h.copy_from = -1;  // another copy is chosen
      choose(s);
      if (rank >= layout_.workers()) continue;
      client(s, rank).arrived = 0;
      client(s, rank).last.reset();
      if (!h.service) continue;
      h.service->lost(rank);
      answer(s);  // other workers may have waited for it
    }
  }
  void returned(int rank) {
    if (rank >= layout_.workers()) return;
    returned_.insert(rank);
    for (Held& h : shards_)
      if (h.service) h.service->returned(rank);
  }
  // Makes the steps whose grace time has ended.
  void look_at_clock() {
    for (std::uint64_t s = 0; s < shards_.size(); s++)
      if (serves(s) && held(s).service->due() <= now()) answer(s);
  }
  // Sends no snapshot before the previous one is sent: on a slow network there are fewer snapshots, and no queue.
  void send_snapshots(int to) {
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
  bool snapshot_under_way() const { return !snapshot_under_way_.expired(); }

  // Messages of a worker. place: memory for a part; nothing if the part belongs to an abandoned push. shared: the bytes
  // are the worker's memory, and stay unchanged until the push is answered. The shard is served, except for parts.
  std::optional<std::span<std::byte>> place(int from, const message::Push& m, std::size_t bytes) {
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
  void push(int from, const message::Push& m, std::span<std::byte> bytes, bool shared) {
    Client& c = client(m.shard, from);
    if (!begins(c, m.exchange)) return;
    const std::int64_t length = layout_.length(int(m.shard));
    const auto numel = std::int64_t(bytes.size() / size_of(layout_.pushed_as(int(m.shard))));
    if (shared && numel == length) {
      c.gradient = tensor(m.shard, bytes.data());
    } else {
      const std::span<std::byte> at = *place(from, m, bytes.size());
      if (at.data() != bytes.data()) std::copy(bytes.begin(), bytes.end(), at.begin());
      if (layout_.pushed_as(int(m.shard)) != layout_.dtype)
        widen(c.staged.write<float>() + m.first, c.narrow.data() + m.first, numel);
      c.gradient = c.staged;
    }
    c.arrived += numel;
    if (m.last) c.last = m;
    if (!c.last || c.arrived < length) return;
    const message::Push last = *std::exchange(c.last, {});
    held(m.shard).service->push(from, m.exchange, c.gradient, last.samples, place_answer(from, m.shard, m.exchange));
    answer(m.shard);
  }
  void pull(int from, const message::Pull& m) {
    held(m.shard).service->pull(from, m.exchange, place_answer(from, m.shard, m.exchange));
    answer(m.shard);
  }
  void idle(int from, const message::Idle& m) {
    held(m.shard).service->idle(from, m.exchange, m.pause);
    answer(m.shard);
  }
  void velocity_wanted(int from, std::uint64_t s) {
    const Tensor& velocity = held(s).service->shard().velocity(0);
    const auto* bytes = static_cast<const std::byte*>(velocity.raw());
    send(channel_, from, message::Velocity{{s}}, std::vector(bytes, bytes + velocity.bytes()));
  }
  // Messages of any rank. After copied() and offered() this rank may serve another shard.
  void copied(int from, const message::Copy& m, std::span<std::byte> bytes) {
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
  void offered(int from, const message::Offer& m) {
    // A rejoined rank sends offers to all owners; most owners need none.
    if (!held(m.shard).taking_over && layout_.owner[m.shard] == channel_.rank()) return;
    held(m.shard).offers[from] = m;
    choose(m.shard);
  }
  void snapshot(const message::Snapshot& m, std::span<const std::byte> bytes) {
    held(m.shard).snapshot.assign(bytes.begin(), bytes.end());
  }

 private:
  struct Client {                       // one worker, for one shard
    Tensor staged;                      // the parts received so far
    std::vector<bf16> narrow;           // the same as received, if gradients are sent as bf16
    Tensor gradient;                    // what is pushed: `staged`, or the worker's memory
    ExchangeId exchange = 0;            // the exchange being received
    std::int64_t arrived = 0;           // elements of it that have arrived
    std::optional<message::Push> last;  // its last part; it may arrive before the others
    std::shared_ptr<void> answers;      // two copies
  };
  struct Held {
    std::unique_ptr<ShardService> service;  // null: this rank does not serve it, or not yet
    std::vector<Client> clients;
    bool taking_over = false;
    std::map<int, message::Offer> offers;  // some may arrive before this rank has received the loss
    int copy_from = -1;                    // the rank whose copy is the shard's beginning
    std::vector<std::byte> snapshot;       // the last one that arrived
  };
  Held& held(std::uint64_t s) { return shards_[s]; }
  Client& client(std::uint64_t s, int worker) { return shards_[s].clients[std::size_t(worker)]; }
  Tensor tensor(std::uint64_t s, std::byte* memory) {
    return Tensor::wrap(*host_, memory, {layout_.length(int(s))}, layout_.dtype, others_);
  }
  // False: it belongs to an abandoned push. Its worker has continued with a higher number.
  bool begins(Client& c, ExchangeId exchange) {
    if (exchange > c.exchange) {
      c.exchange = exchange;
      c.arrived = 0;
      c.last.reset();
    }
    return exchange == c.exchange;
  }
  // The memory for the answer to a worker. The answer to its previous exchange stays unchanged where the worker reads
  // it.
  Tensor place_answer(int worker, std::uint64_t s, ExchangeId exchange) {
    Client& c = client(s, worker);
    const std::size_t copy = layout_.copy_bytes(int(s));
    if (!c.answers) c.answers = channel_.share(2 * copy);
    const std::size_t half = channel_.reaches(worker) ? exchange & 1 : 0;
    return tensor(s, static_cast<std::byte*>(c.answers.get()) + half * copy);
  }
  void answer(std::uint64_t s) {
    ShardService& service = *held(s).service;
    for (ShardService::Answer& a : service.answers(now())) {
      const std::span<std::byte> copy(static_cast<std::byte*>(a.weights.raw_write()), layout_.copy_bytes(int(s)));
      const auto applied = std::as_bytes(std::span(service.applied()));
      std::copy(applied.begin(), applied.end(), copy.end() - std::ptrdiff_t(applied.size()));
      channel_.send(
          a.worker,
          packed(message::Answer{{s, a.exchange}, service.shard().version(), service.counts().pushes, a.verdict}),
          copy);
    }
  }
  // Chooses once all live ranks have sent offers, including rejoined ranks: these may have received the newest answer.
  void choose(std::uint64_t s) {
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
  void serve(std::uint64_t s, const Tensor& first) {
    const std::int64_t begin = layout_.begin(int(s)) / 64, end = begin + layout_.length(int(s)) / 64;
    const bool parameters = layout_.of_parameters(int(s));
    ServerOptions options = layout_.options;
    // Statistics are averaged in as they arrive: the mean of a quorum would replace the contributions of the other
    // workers. The statistics of a batch whose gradient is dropped count too.
    if (options.how.kind != Asynchrony::Kind::bsp && !options.how.takes_each() && !parameters) options.how = {};
    held(s).service = std::make_unique<ShardService>(parameters ? *rule_ : *averaging_, first,
                                                     std::vector<float>(scales_.begin() + begin, scales_.begin() + end),
                                                     layout_.workers(), std::move(options));
    const std::vector<bool> living = channel_.living();
    // No worker waits for a rank that is absent, or may not have rejoined yet, until that rank sends a request here.
    for (int m = 0; m < layout_.workers(); m++)
      if (!living[std::size_t(m)] || returned_.count(m)) held(s).service->lost(m);
  }

  const ServerLayout& layout_;
  Channel& channel_;
  const std::vector<float> scales_;
  std::unique_ptr<Rule> rule_, averaging_;
  std::unique_ptr<Backend> host_;
  std::shared_ptr<void> others_;  // owner of memory that others keep
  std::vector<Held> shards_;
  std::int64_t taken_over_ = 0;
  std::set<int> returned_;
  std::weak_ptr<const void> snapshot_under_way_;
};

}  // namespace tandem
