// ShardServer: the owner's side of the parameter server, for the shards that this rank holds. It stages pushed parts
// until a shard's range is complete and the worker has confirmed the push. Then ShardService applies the push, and the
// owner sends the answers that ShardService returns. It sends them as parts, or it computes them directly in the
// worker's memory if it reaches that, without a copy.
//
// Threads: the member's thread only.
#pragma once
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "core/backend.h"
#include "dist/server/deferred_queue.h"
#include "dist/server/fail_over.h"
#include "dist/server/rules.h"
#include "dist/server/send_queue.h"
#include "dist/server/server_layout.h"
#include "dist/server/server_messages.h"
#include "dist/server/shard_service.h"

namespace tandem {

class ShardServer {
 public:
  // scales: learning-rate factors, one per 64 elements of all shards. Throws UsageError if the rule does not exist.
  ShardServer(const ServerLayout& layout, SendQueue& send_queue, std::vector<float> scales);
  ~ShardServer();

  void begin();                                  // empty shards receive no first values
  void take_over(FailOvers::TakenOver&& shard);  // continues the shard of a lost owner
  void lost(int rank), returned(int rank);
  void send_snapshots(int to);
  void look(double patience) const;  // throws Error if a worker's memory was unreachable for so many seconds
  bool snapshot_under_way() const { return !snapshot_under_way_.expired(); }
  const ShardService* first() const;  // of the shards that this rank serves; null: none

  // Messages of a worker or of rank 0. place: for parts; nothing if they belong to an abandoned push.
  std::optional<std::span<std::byte>> place(int from, const MessageHeader& n, std::size_t bytes);
  void push_part(int from, const MessageHeader& n, std::int64_t numel);
  void push(int from, const MessageHeader& n);
  void request(int from, const MessageHeader& n);  // push_here, pull; push, when all parts have arrived
  void idle(int from, const MessageHeader& n);     // and blocked
  void look_at_clock();                            // makes the steps whose grace time has ended
  void first_part(const MessageHeader& n, std::int64_t numel);
  void velocity_wanted(int from, int s);

 private:
  struct Client {                               // one worker, for one shard
    Tensor gradient;                            // the parts received so far
    std::vector<bf16> narrow;                   // the same as received, if gradients are sent as bf16
    ExchangeId number = 0;                      // the exchange being received
    std::int64_t arrived = 0;                   // elements of it that have arrived
    std::optional<MessageHeader> push;          // the confirmation; it may arrive before the last part
    Tensor answer;                              // used if the answer is sent
    std::uint64_t receive_buffer = word::none;  // where the answer is written
  };
  struct First {
    Tensor values, velocity;
    std::int64_t arrived = 0;  // elements, of both
  };
  struct Held {
    std::unique_ptr<ShardService> service;  // null: this rank does not serve it, or not yet
    std::vector<Client> clients;
    First first;
    DeferredQueue deferred;  // messages from before it was served
  };
  Held& held(int s) { return shards_[std::size_t(s)]; }
  Client& client(int s, int worker) { return held(s).clients[std::size_t(worker)]; }
  const Rule& rule_of(int s) const { return layout_.of_parameters(s) ? *rule_ : *averaging_; }
  Tensor tensor(std::int64_t numel) { return Tensor(*host_, {numel}, layout_.dtype); }
  // Parts of the last push that this worker has begun, for this shard. False: they belong to an earlier push.
  bool begins(Client& c, const MessageHeader& n);
  void request_when_whole(int from, int s);
  bool in_reach(int worker, const MessageHeader& n);
  Tensor in_memory_of(int rank, SendQueue::Place place, int s);
  Tensor place_answer(int s, int worker, const MessageHeader& n);
  void serve(int s, const Tensor&first), open(int s), answer(int s);
  // Calls `handle` when this rank serves the shard: at once, after its first values have arrived, or after a fail-over.
  void when_served(int s, int from, std::function<void()> handle);

  const ServerLayout& layout_;
  SendQueue& send_queue_;
  const std::vector<float> scales_;
  std::unique_ptr<Rule> rule_, averaging_;
  std::unique_ptr<Backend> host_;
  std::shared_ptr<void> others_;  // owner of memory that lives as long as the channel
  std::vector<Held> shards_;
  std::set<int> returned_;
  std::map<int, double> out_of_reach_;  // since when
  std::uint64_t snapshots_ = 0;
  std::weak_ptr<const void> snapshot_under_way_;
};

}  // namespace tandem
