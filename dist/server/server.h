// The parameter server. The flat vector is divided evenly over the memories of all servers, by elements and not by
// tensors, so that all servers have the same load. The CPU of each server updates its shard. Workers push a gradient
// and receive the weights: push and pull are one exchange, and an answer confirms that the push was applied.
//
// A server node is one rank: a server, a worker, or both. Its one thread handles the messages and applies the pushes. A
// worker's training thread only waits for answers, so its evaluation never delays a shard.
//
//   ServerNode node(std::move(channel));
//   node.begin(weights, statistics, scales, options, leases);
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
// When a rank is lost, the others continue. Its leases are drawn again. Its shard moves to the next server, which asks
// all ranks for the newest copy that any of them received. Unanswered pushes are sent again; the table that belongs to
// the copy shows whether the copy already contains them. So a push that was confirmed to a live worker is applied
// exactly once. The rule's vectors (velocities) come from a snapshot that owners send to their successors every few
// seconds, in at most a tenth of the time. Later changes of them are lost.
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dist/server/channel.h"
#include "dist/server/shard_service.h"
#include "dist/server/work_leases.h"
#include "layers/train/strategy.h"

namespace tandem {

struct ServerOptions {
  Asynchrony how = {};
  int servers = 0;  // the last `servers` ranks only serve; 0: all ranks train and serve
  double momentum = 0.9;
  // The learning rate after so many pushes were applied to a shard. (Not samples: an epoch's smaller last batch is a
  // step too.)
  std::function<double(std::int64_t pushes)> learning_rate = {};
  DType wire = DType::f32;         // type of gradients; bf16 halves the bytes
  std::int64_t chunk = 256 << 10;  // elements per message
  double snapshots = 10;           // minimum seconds between two snapshots; 0: none
  std::uint64_t memory = 0;        // bytes that this rank has for snapshots; 0: unknown
  bool record = false;             // record the order of events
};

// Where the shards begin: server s has [cuts[s], cuts[s + 1]). The length is a multiple of 1024 elements except for the
// last.
std::vector<std::int64_t> shard_cuts(std::int64_t numel, int servers);

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
  // rank that is alive and works. tells: called at rank 0 by the member's thread with messages for the user: lost and
  // rejoined ranks, ranks whose gradients are refused, and ranks for which the others have waited `patience` seconds.
  using Tells = std::function<void(const std::string&)>;
  explicit ServerNode(std::unique_ptr<Channel> channel, double deadline = 300, Tells tells = {}, double patience = 30);
  ~ServerNode();
  int rank() const;
  int size() const;
  std::string where() const;
  bool trains() const;  // after begin(): this rank is a worker
  int workers() const;

  // Zeroed memory. Gradients in it are pushed to ranks of this host without a copy.
  std::shared_ptr<void> memory(std::size_t bytes);
  // Every rank's text, in the order of ranks; empty for lost ranks. All ranks call it.
  std::vector<std::string> gather(const std::string& mine);

  // Vectors in host memory, f32 or f64; training begins with those of rank 0. scales: learning-rate factors, one per 64
  // elements. The member's thread calls learning_rate. Rank 0's leases are used. velocity: at rank 0, the result of
  // velocity(), to resume training; none: zero.
  void begin(Buffer parameters, Buffer buffers, std::vector<float> scales, ServerOptions options, WorkLeases leases,
             Buffer velocity = {});
  // Waits for the next step of this worker. Nothing: the run is over. A rank that only serves stays in this call. It
  // polls asked_to_stop and calls stop() if that is true.
  std::optional<std::int64_t> lease(const std::function<bool()>& asked_to_stop = {});
  std::int64_t lease_count() const;  // consecutive leases under the number of the last one (WorkLeases)
  // The lease that lease() will return, if it is known; does not wait
  std::optional<std::int64_t> next_lease() const;
  // The range [begin, end) of the next pushed gradient is final and must stay unchanged until pull(). It is sent now.
  // If the gradient is not pushed, the next call of ask(), push() or finish() discards the range.
  void push_part(Buffer gradient, Range part);
  bool pushes_parts() const;  // push_part() is useful: an owner does not reach this rank's memory
  // Pushes for the lease that was drawn last. buffers: the running statistics after its batches.
  void push(Buffer gradient, Buffer buffers, std::int64_t samples, const MetricSums& sums);
  void ask();  // requests the weights without a push
  // The answer to the last push, to ask() or to begin(). True if all owners took the gradient. False if it was not
  // finite, if with bsp another gradient of the same step was not finite, or if it was too late for an owner (Verdict).
  bool pull(Buffer parameters, Buffer buffers);
  // Stops this worker. Its unfinished leases are given to other workers. The run ends when all workers have stopped.
  void leave();
  // Calls leave(), waits for the others, and returns the last weights.
  void finish(Buffer parameters, Buffer buffers);
  // After a call threw because rank 0 is lost: true if this is the lowest live worker, as far as this rank knows.
  bool is_first_of_what_is_left() const;
  void stop();  // no worker draws more leases; any rank may call it
  bool stopped() const;

  // The metric sums of all workers' training since the last call; only rank 0 has them.
  MetricSums trained();
  std::int64_t leases_done() const;  // of all workers; exact at rank 0, on other ranks as of their last lease
  // Writes the velocity of all shards at rank 0, for checkpoints (rank 0's, if each worker has its own). False if the
  // rule keeps none.
  bool velocity(Buffer into);
  Counts counts() const;                   // reads them on the member's thread
  std::vector<ShardEvent> events() const;  // of this rank's first shard, if recorded

 private:
  class Thread;
  std::unique_ptr<Thread> thread_;
};

// "mean_delay", "participation", and the number of pushes by delay: "delay_0" …, from 16 on by powers of two:
// "delay_16_to_31" …
Measures measures_of_delays(const ShardCounts& shard);

}  // namespace tandem
