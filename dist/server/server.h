// The parameter server. The flat vector is divided evenly over the memories of all servers, by elements and not by
// tensors, so that all servers have the same load. The CPU of each server updates its shard. Workers push a gradient
// and receive the weights: push and pull are one exchange, and an answer confirms that the push was applied.
//
// A server node is one rank: a server, a worker, or both. Its one thread, the member's, sends and receives the
// messages, passes each to the object that handles it, and applies the pushes. The training thread calls the public
// functions, which post commands to the member's thread and wait for their results. So an evaluation in the training
// thread never delays a shard.
//
//   ServerNode node(std::move(channel));
//   node.begin(weights, statistics, blocks, options, leases);
//   node.pull(weights, statistics);                        // rank 0's, the same on all ranks
//   while (auto lease = node.lease()) {                    // the next batch; with bsp it is requested already
//     …
//     node.push_part(gradients, range);                    // optional: this range is final already
//     node.push(gradients, statistics, samples, score);    // returns at once: keep the data unchanged until pull()
//     node.pull(weights, statistics);                      // the weights after it
//   }
//   node.finish(weights, statistics);                      // the last weights, the same on all ranks
//
// A gradient is staged until all parts of a shard's range have arrived and push() was called. Then it is applied as a
// whole. An answer contains one version of a shard. Ranks of one host read gradients in place and write answers in
// place.
//
// When a rank is lost, the others continue. Its leases are given to other workers. Its shard moves to the next server,
// which asks all ranks for the newest copy that any of them received. Unanswered pushes are sent again; the table that
// belongs to the copy shows whether the copy already contains them. So a push that was confirmed to a live worker is
// applied exactly once. The rule's vectors (velocities) come from a snapshot that owners send to their successors every
// few seconds, in at most a tenth of the time. Later changes of them are lost.
#pragma once
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "dist/server/channel.h"
#include "dist/server/server_layout.h"
#include "dist/server/server_messages.h"
#include "dist/server/work_leases.h"
#include "layers/train/strategy.h"

namespace tandem {

class Coordinator;
class ShardServer;
class Worker;

class ServerNode {
 public:
  struct Counts {
    ShardCounts shard;  // of the first shard that this rank holds; empty if it holds none
    // Bytes sent; exchanges of this worker; exchanges with a gradient that was not finite; with one that was too late
    std::int64_t bytes = 0, exchanges = 0, refused = 0, dropped = 0;
    std::int64_t early_bytes = 0;  // sent by push_part()
    double waited = 0;             // seconds that this worker waited for answers and leases
    std::int64_t taken_over = 0;   // shards taken over from lost ranks
    Measures measures() const;     // by name, including the histogram of delays
  };

  // deadline: seconds after which it is an error that all ranks wait for each other; a rank waits without limit for a
  // rank that is alive and works. user: called at rank 0 by the member's thread with messages for the user: lost and
  // rejoined ranks, ranks whose gradients are refused, and ranks for which the others have waited `patience` seconds.
  using Notify = std::function<void(const std::string&)>;
  explicit ServerNode(std::unique_ptr<Channel> channel, double deadline = 300, Notify user = {}, double patience = 30);
  ~ServerNode();
  int rank() const { return channel_->rank(); }
  int size() const { return channel_->size(); }
  std::string where() const { return channel_->where(rank()); }
  bool trains() const { return rank() < workers(); }  // after begin(): this rank is a worker
  int workers() const { return layout_ ? layout_->workers() : size(); }

  // Zeroed memory. Gradients in it are pushed to ranks of this host without a copy.
  std::shared_ptr<void> memory(std::size_t bytes) { return channel_->share(bytes); }
  // Every rank's text, in the order of ranks; empty for lost ranks. All ranks call it.
  std::vector<std::string> gather(const std::string& mine);

  // Vectors in host memory, f32 or f64; training begins with those of rank 0. blocks: one per 64 elements of the
  // parameters. The member's thread calls learning_rate. Rank 0's leases are used. velocity: at rank 0, the result of
  // velocity(), to resume training; none: zero.
  void begin(Buffer parameters, Buffer buffers, std::vector<RuleBlock> blocks, ServerOptions options, WorkLeases leases,
             Buffer velocity = {});
  // Waits for the next step of this worker. Nothing: the run is over. A rank that only serves stays in this call. It
  // polls asked_to_stop and calls stop() if that is true.
  std::optional<std::int64_t> lease(const std::function<bool()>& asked_to_stop = {});
  // The number of consecutive leases that this worker holds under one number and has not pushed (WorkLeases); 0: none.
  std::int64_t lease_count() const { return holds_ ? holds_->count : 0; }
  // The lease that lease() will return, if it is known; does not wait
  std::optional<std::int64_t> next_lease() const {
    return locked([&] { return lease_of(next_lease_); });
  }
  // The range [begin, end) of the next pushed gradient is final and must stay unchanged until pull(). It is sent now.
  // If ask() or finish() is called instead of push(), the range is discarded.
  void push_part(Buffer gradient, Range part);
  // True if push_part() sends: an owner does not reach this rank's memory, or gradients are sent as bf16.
  bool pushes_parts() const { return pushes_parts_; }
  // Pushes for the lease that was drawn last. buffers: the running statistics after its batches.
  void push(Buffer gradient, Buffer buffers, std::int64_t samples, const MetricSums& sums);
  void ask();  // requests the weights without a push
  // Waits for the answer to the last push, to ask() or to begin(). False if the gradient was not finite, if with bsp
  // another gradient of the same step was not finite, or if it was too late for the first shard (Verdict).
  bool pull(Buffer parameters, Buffer buffers);
  // Stops this worker. Its unfinished leases are given to other workers. The run ends when all workers have stopped.
  void leave();
  // Calls leave(), waits for the others, and returns the last weights.
  void finish(Buffer parameters, Buffer buffers);
  // After a call threw because rank 0 is lost: true if this is the lowest live worker, as far as this rank knows.
  bool is_first_survivor() const;
  void stop() { post_message(message::StopAll{}); }  // no worker draws more leases; any rank may call it

  // The metric sums of all workers' training since the last call; only rank 0 has them.
  MetricSums trained() {
    return locked([&] { return std::exchange(sums_, {}); });
  }
  // The leases that all workers have done: exact at rank 0, elsewhere as of rank 0's last reply.
  std::int64_t leases_done() const { return leases_done_; }
  // Writes the velocity of all shards at rank 0, for checkpoints (rank 0's, if each worker has its own). False if the
  // rule keeps none.
  bool velocity(Buffer into);
  Counts counts();                   // reads them on the member's thread
  std::vector<ShardEvent> events();  // of this rank's first shard, if recorded

 private:
  static std::optional<std::int64_t> lease_of(const std::optional<message::LeaseIs>& drawn) {
    return drawn ? std::optional(drawn->lease) : std::nullopt;
  }
  struct Waits {
    std::string what = {};  // empty: the training thread works
    double since = 0;
  };

  // ---- between the threads ------------------------------------------------------------------------------------------
  // With bsp the leases of a step are assigned together: workers without a lease would wait for one that held an extra
  // lease.
  bool synchronous() const { return layout_->options.how.kind == Asynchrony::Kind::bsp; }
  bool quorum() const { return layout_->options.how.kind == Asynchrony::Kind::quorum; }
  void check_snapshots() const;
  void post(std::function<void()> command);
  template <class M>
  void post_message(const M& m) {
    post([this, m] { send(*channel_, 0, m); });
  }
  void read(const std::function<void()>& f);
  void wait(
      const char* what, const std::function<bool()>& done, const std::function<void()>& then = [] {},
      const std::function<void()>& meanwhile = {});
  template <class F>
  std::invoke_result_t<const F&> locked(const F& f) const {
    std::lock_guard lock(mutex_);
    return f();
  }
  void change(const std::function<void()>& f);

  // ---- the member's thread ------------------------------------------------------------------------------------------
  void run();
  double look_around();
  bool over() const {
    return locked([&] { return over_; });
  }
  void notify(const std::string& what) const;
  std::string data_of(int rank, const std::string& before) const;  // ServerOptions::data_of; empty: none of its own
  void report_refusals() const;
  void report_waiting(const std::string& at_the_end = {});
  void look_for_standstill();

  std::optional<std::span<std::byte>> place(int from, const MessageHeader& header, std::size_t bytes);
  void arrived(int from, const MessageHeader& header, std::span<std::byte> bytes, bool shared);
  bool is_early(int from, const Message& m) const;
  void handle(int from, const Message& m, std::span<std::byte> bytes, bool shared);
  Coordinator& coordinator(int from);
  void defer(int from, std::function<void()> f) { deferred_.push_back({from, std::move(f)}); }
  void handle_deferred();

  void ready();
  void answered(const message::Answer& answer, std::span<std::byte> bytes);
  void done(int worker, const message::Done& d);
  void lost(int rank), returned(int rank), rejoin();

  const double deadline_, patience_;
  const Notify notify_;

  std::unique_ptr<ServerLayout> layout_;  // this and the next two: created by begin()
  std::unique_ptr<Worker> worker_;
  std::unique_ptr<ShardServer> shard_server_;
  std::unique_ptr<Coordinator> coordinator_;  // at rank 0, from the beginning
  std::unique_ptr<Channel> channel_;          // destroyed before the objects whose memory it sends

  // Used by the member's thread.
  Counts counts_;  // exchanges, refused, dropped, early_bytes
  static constexpr int nobody = -1;
  // Messages, losses and returns that are handled later, in their order, with the rank that sent the message.
  std::vector<std::pair<int, std::function<void()>>> deferred_;
  bool ready_ = false;                   // the owners of the shards are known, and this rank takes part
  std::map<int, std::int64_t> refused_;  // at rank 0: refused leases, by worker
  std::uint64_t generation_ = 0;         // the membership's generation that layout_->owner belongs to
  std::optional<std::pair<std::uint64_t, std::vector<int>>> owners_;  // as sent by rank 0: generation, owners by shard
  double pushed_at_ = 0;
  double next_look_ = 0, next_snapshot_ = 0, snapshot_began_ = 0;
  Waits reported_wait_;
  double looked_at_ = 0;  // when the training thread was last found waiting
  bool warned_ = false;   // a warning was printed for the current standstill

  // Used by the training thread.
  std::optional<message::LeaseIs> holds_;  // until it is pushed
  std::uint64_t gatherings_ = 0;
  double waited_ = 0;  // seconds

  // Used by both threads.
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> commands_;                  // for the member's thread
  std::map<std::uint64_t, std::vector<std::string>> gathered_;  // by gathering
  std::optional<message::LeaseIs> next_lease_;
  std::atomic<bool> pushes_parts_{false};  // Worker::sends_parts(), at the last answer
  bool waiting_ = true;                    // for an answer; begin() requests the first
  bool velocity_here_ = false;
  bool over_ = false, ended_ = false;  // these and the next: as reported by rank 0
  std::atomic<std::int64_t> leases_done_{0};
  bool end_ = false;  // this object is being destroyed
  MetricSums sums_;
  Waits waits_;
  std::exception_ptr failed_;
  std::thread thread_;  // the last member: the thread uses the others
};

}  // namespace tandem
