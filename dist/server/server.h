// The parameter server: the flat vector is cut evenly over the memories of all servers, by elements and not by tensors,
// so that none is busier than the others. The CPU of each makes the updates of its shard. Workers push a gradient and
// get the weights back: push and pull are one exchange, and an answer says that the push was applied.
//
// A server node is a rank of it: a server, a worker, or both, with one thread that carries the messages and applies
// what comes. The training thread of a worker only waits for answers, so its evaluation never keeps a shard busy.
//
//   ServerNode node(std::move(channel));
//   node.begin(weights, statistics, scales, options, leases);
//   node.pull(weights, statistics);                        // rank 0's, the same everywhere
//   while (auto lease = node.lease()) {                    // which batch; but with bsp the next one is already asked
//   for
//     …
//     node.push_part(gradients, range);                    // may be left out: this much of it is final already
//     node.push(gradients, statistics, samples, score);    // returns at once: keep them as they are until pull()
//     node.pull(weights, statistics);                      // the weights after it
//   }
//   node.finish(weights, statistics);                      // the last weights, the same everywhere
//
// A gradient is staged until all of a shard's part has come and push() was called, and then applied as a whole; an
// answer is of one version of a shard. Ranks of one host read gradients where they lie and write answers to where they
// are wanted.
//
// When a rank is lost the others go on. Its leases are drawn again. Its shard goes to the next server, which asks
// everyone for the newest copy that anybody was answered with; what was pushed and not answered is pushed again, and
// whether it is in that copy already says the table that came with it. So what a living worker was told is applied is
// there, once. What the rule keeps (velocities) comes from a snapshot that owners send to their successors every few
// seconds, in a tenth of the time at most; what came since is lost.
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
  int servers = 0;  // the last so many ranks only serve; 0: all ranks train, and serve
  double momentum = 0.9;
  // After so many pushes were applied to a shard. (Not samples: the smaller last batch of an epoch is a step too.)
  std::function<double(std::int64_t pushes)> learning_rate = {};
  DType wire = DType::f32;         // of gradients: bf16 in half the bytes
  std::int64_t chunk = 256 << 10;  // elements of a message
  double snapshots = 10;           // seconds between two, at least; 0: none
  std::uint64_t memory = 0;        // bytes that this rank has for them; 0: unknown
  bool record = false;             // keep the order of events
};

// Where the shards begin: server s has [cuts[s], cuts[s + 1]), a multiple of 1024 elements but for the last.
std::vector<std::int64_t> shard_cuts(std::int64_t numel, int servers);

class ServerNode {
 public:
  struct Counts {
    ShardCounts shard;  // of the first shard that this rank holds; empty where it holds none
    // Sent; of this worker; of these, not finite, too late
    std::int64_t bytes = 0, exchanges = 0, refused = 0, dropped = 0;
    std::int64_t early_bytes = 0;  // sent by push_part()
    double waited = 0;             // seconds that this worker waited for answers and leases
    std::int64_t taken_over = 0;   // shards that came from lost ranks
    Measures measures() const;     // by name, with the histogram of delays
  };

  // deadline: seconds after which it is an error that all ranks wait for each other; for one that lives and works a
  // rank waits as long as that takes. tells: at rank 0, what a person at the job should hear of, by the member's
  // thread: who is lost or back, whose gradients are refused, who has kept the others waiting for `patience` seconds.
  using Tells = std::function<void(const std::string&)>;
  explicit ServerNode(std::unique_ptr<Channel> channel, double deadline = 300, Tells tells = {}, double patience = 30);
  ~ServerNode();
  int rank() const;
  int size() const;
  std::string where() const;
  bool trains() const;  // after begin(): this rank is a worker
  int workers() const;

  // Memory from which gradients are pushed without a copy to ranks of this host, zeroed.
  std::shared_ptr<void> memory(std::size_t bytes);
  // Every rank's text, in the order of ranks; of lost ones an empty one. All ranks call it.
  std::vector<std::string> gather(const std::string& mine);

  // Vectors in the host's memory, f32 or f64; those of rank 0 are what training begins with. scales: of the learning
  // rate, one for each 64 elements. learning_rate is called by the member's thread. leases: rank 0's count. velocity:
  // as velocity() gave it, at rank 0, to go on with; none: zero.
  void begin(Buffer parameters, Buffer buffers, std::vector<float> scales, ServerOptions options, WorkLeases leases,
             Buffer velocity = {});
  // The next step of this worker; waits. Nothing: the run is over. A rank that only serves does so in here.
  // asked_to_stop is looked at meanwhile, and where it is true that is stop().
  std::optional<std::int64_t> lease(const std::function<bool()>& asked_to_stop = {});
  std::int64_t lease_count() const;  // consecutive leases that go by the number of the last one (WorkLeases)
  // What lease() will return, as far as that is known; waits for nothing
  std::optional<std::int64_t> next_lease() const;
  // [begin, end) of the gradient that is pushed next is final, and stays as it is until pull(): it goes out now. A
  // gradient that is not pushed after all is forgotten with the next call of ask(), push() or finish().
  void push_part(Buffer gradient, Range part);
  bool pushes_parts() const;  // this pays: an owner does not reach this rank's memory
  // For the lease that was drawn last. statistics: the running ones after its batches.
  void push(Buffer gradient, Buffer buffers, std::int64_t samples, const MetricSums& sums);
  void ask();  // for the weights alone
  // The answer to the last push, to ask() or to begin(). True when its gradient was taken by all owners;
  // false when it was not finite, or, with bsp, another's of the same step, or too late for one of them (Verdict).
  bool pull(Buffer parameters, Buffer buffers);
  // Nothing comes from here any more: what was drawn is drawn again by others, and the run is over when all workers say
  // so.
  void leave();
  // Leaves, and waits for the others; then the last weights.
  void finish(Buffer parameters, Buffer buffers);
  // After one of these calls threw because rank 0 is lost: is this the lowest worker that lives, as far as it knows?
  bool is_first_of_what_is_left() const;
  void stop();  // no more leases are drawn, by anyone; any rank
  bool stopped() const;

  // What all workers have trained since the last call; rank 0 knows.
  MetricSums trained();
  std::int64_t leases_done() const;  // of all; rank 0 knows, the others as they heard with their last lease
  // The velocity of all shards, at rank 0, for checkpoints (where each worker has its own: rank 0's); false where the
  // rule keeps none.
  bool velocity(Buffer into);
  Counts counts() const;                   // asks the member's thread
  std::vector<ShardEvent> events() const;  // of this rank's first shard, when recorded

 private:
  class Thread;
  std::unique_ptr<Thread> thread_;
};

// "mean_delay", "participation", and how many pushes were so late: "delay_0" …, from 16 on by powers of two:
// "delay_16_to_31" …
Measures measures_of_delays(const ShardCounts& shard);

}  // namespace tandem
