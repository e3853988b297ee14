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
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "core/backend.h"
#include "dist/server/rules.h"
#include "dist/server/server_layout.h"
#include "dist/server/server_messages.h"

namespace tandem {

class ShardServer {
 public:
  // blocks: one per 64 elements of all shards. Throws UsageError if the rule does not exist.
  ShardServer(const ServerLayout& layout, Channel& channel, std::vector<RuleBlock> blocks);
  ~ShardServer();

  bool serves(std::uint64_t s) const { return shards_[s].service != nullptr; }  // it has its weights
  const ShardService* first() const;                       // of the shards that this rank serves; null: none
  std::int64_t taken_over() const { return taken_over_; }  // shards
  void take_over(std::uint64_t s);  // this rank is now layout.owner[s]; its own offer arrives like the others
  void lost(int rank), returned(int rank);
  void look_at_clock();  // makes the steps whose grace time has ended
  void send_snapshots(int to);
  bool snapshot_under_way() const { return !snapshot_under_way_.expired(); }

  // Messages of a worker. place: memory for a part; nothing if the part belongs to an abandoned push. shared: the bytes
  // are the worker's memory, and stay unchanged until the push is answered. The shard is served, except for parts.
  std::optional<std::span<std::byte>> place(int from, const message::Push& m, std::size_t bytes);
  void push(int from, const message::Push& m, std::span<std::byte> bytes, bool shared);
  void pull(int from, const message::Pull& m);
  void idle(int from, const message::Idle& m);
  void velocity_wanted(int from, std::uint64_t s);
  // Messages of any rank. After copied() and offered() this rank may serve another shard.
  void copied(int from, const message::Copy& m, std::span<std::byte> bytes);
  void offered(int from, const message::Offer& m);
  void snapshot(const message::Snapshot& m, std::span<const std::byte> bytes);

 private:
  struct Client {                         // one worker, for one shard
    Tensor staged;                        // the parts received so far
    std::vector<bf16> narrow;             // the same as received, if gradients are sent as bf16
    ExchangeId exchange = 0;              // the exchange being received
    std::int64_t arrived = 0;             // elements of it that have arrived
    std::optional<std::int64_t> samples;  // of its last part, which may arrive before the others
    std::shared_ptr<void> answers;        // two copies
  };
  struct Held {
    std::unique_ptr<ShardService> service;  // null: this rank does not serve it, or not yet
    std::vector<Client> clients;
    bool taking_over = false;
    std::map<int, message::Offer> offers;  // some may arrive before this rank has received the loss
    int copy_from = -1;                    // the rank whose copy the shard begins with; −1: not chosen
    std::vector<std::byte> snapshot;       // the last one that arrived
  };
  Held& held(std::uint64_t s) { return shards_[s]; }
  Client& client(std::uint64_t s, int worker) { return shards_[s].clients[std::size_t(worker)]; }
  Tensor tensor(std::uint64_t s, std::byte* memory) {
    return Tensor::wrap(*host_, memory, {layout_.length(int(s))}, layout_.dtype, others_);
  }
  bool begins(Client& c, ExchangeId exchange);
  Tensor place_answer(int worker, std::uint64_t s, ExchangeId exchange);
  void answer(std::uint64_t s), choose(std::uint64_t s);
  void serve(std::uint64_t s, const Tensor& first);

  const ServerLayout& layout_;
  Channel& channel_;
  const std::vector<RuleBlock> blocks_;
  std::unique_ptr<Rule> rule_, averaging_;
  std::unique_ptr<Backend> host_;
  std::shared_ptr<void> others_;  // owner of memory that others keep
  std::vector<Held> shards_;
  std::int64_t taken_over_ = 0;
  std::set<int> returned_;
  std::weak_ptr<const void> snapshot_under_way_;
};

}  // namespace tandem
