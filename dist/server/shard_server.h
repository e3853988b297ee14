// Owner: an owner's side of the parameter server, the shards that this rank holds. It stages what workers push until
// all of a shard's part has come and its worker has confirmed the push, has ShardService apply it, and sends the
// answers that ShardService gives: as parts, or, where it reaches the worker's memory, made there, with no copy
// between.
//
// The member's thread alone.
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
  // scales: of the learning rate, one for each 64 elements of all shards. Throws UsageError where there is no such
  // rule.
  ShardServer(const ServerLayout& layout, SendQueue& send_queue, std::vector<float> scales);
  ~ShardServer();

  void begin();                                  // of what is empty no first values come
  void take_over(FailOvers::TakenOver&& shard);  // goes on where a lost owner stopped
  void lost(int rank), returned(int rank);
  void send_snapshots(int to);
  void look(double patience) const;  // throws Error where a worker's memory was out of reach for so many seconds
  bool snapshot_under_way() const { return !snapshot_under_way_.expired(); }
  const ShardService* first() const;  // of the shards that this rank serves; null: it serves none

  // Messages of a worker or of rank 0. place: of parts; nothing where they are of a push that is given up.
  std::optional<std::span<std::byte>> place(int from, const MessageHeader& n, std::size_t bytes);
  void push_part(int from, const MessageHeader& n, std::int64_t numel);
  void push(int from, const MessageHeader& n);
  void request(int from, const MessageHeader& n);  // push_here, pull; push, when all parts have come
  void idle(int from, const MessageHeader& n);     // and blocked
  void look_at_clock();                            // makes the steps whose grace time is over
  void first_part(const MessageHeader& n, std::int64_t numel);
  void velocity_wanted(int from, int s);

 private:
  struct Client {                       // a worker, at one shard
    Tensor gradient;                    // as far as it has come
    std::vector<bf16> narrow;           // and as it came, where gradients travel as bf16
    ExchangeId number = 0;              // of what comes
    std::int64_t arrived = 0;           // elements of it
    std::optional<MessageHeader> push;  // its worker wants it applied; it may say so before the last part has come
    Tensor answer;                      // made here when it is sent
    std::uint64_t receive_buffer = word::none;  // where it wants the answer
  };
  struct First {
    Tensor values, velocity;
    std::int64_t arrived = 0;  // elements, of all
  };
  struct Held {
    std::unique_ptr<ShardService> service;  // null: this rank does not serve it, or not yet
    std::vector<Client> clients;
    First first;
    DeferredQueue deferred;  // what came before it was served
  };
  Held& held(int s) { return shards_[std::size_t(s)]; }
  Client& client(int s, int worker) { return held(s).clients[std::size_t(worker)]; }
  const Rule& rule_of(int s) const { return layout_.of_parameters(s) ? *rule_ : *averaging_; }
  Tensor tensor(std::int64_t numel) { return Tensor(*host_, {numel}, layout_.dtype); }
  // Parts of the last push that this worker has begun, at this shard; false: they are of an earlier one.
  bool begins(Client& c, const MessageHeader& n);
  void request_when_whole(int from, int s);
  bool in_reach(int worker, const MessageHeader& n);
  Tensor in_memory_of(int rank, SendQueue::Place place, int s);
  Tensor place_answer(int s, int worker, const MessageHeader& n);
  void serve(int s, const Tensor&first), open(int s), answer(int s);
  // Once this rank serves the shard: at once, or when its first values have come, or a fail-over is over.
  void when_served(int s, int from, std::function<void()> handle);

  const ServerLayout& layout_;
  SendQueue& send_queue_;
  const std::vector<float> scales_;
  std::unique_ptr<Rule> rule_, averaging_;
  std::unique_ptr<Backend> host_;
  std::shared_ptr<void> others_;  // stands for memory that lives as long as the channel
  std::vector<Held> shards_;
  std::set<int> returned_;
  std::map<int, double> out_of_reach_;  // since when
  std::uint64_t snapshots_ = 0;
  std::weak_ptr<const void> snapshot_under_way_;
};

}  // namespace tandem
