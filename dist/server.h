// The parameter server: the flat vector is cut evenly over the memories of all servers, by elements and not by tensors, so that
// none is busier than the others. The CPU of each makes the updates of its shard. Workers push a gradient and get the weights
// back: push and pull are one exchange, and an answer says that the push was applied.
//
// A member is a rank of it: a server, a worker, or both, with one thread that carries the messages and applies what comes. The
// training thread of a worker only waits for answers, so its evaluation never keeps a shard busy.
//
//   Member member(std::move(channel), space.values, scales, options);
//   member.push(space.gradients, step, samples);      // returns at once: keep the gradient as it is until pull()
//   member.pull(space.values);                        // the weights after it
//   member.finish(space.values);                      // when no batch is left: the last weights, the same everywhere
//
// A gradient is staged until all of a shard's part has come, and then applied as a whole; an answer is of one version of a
// shard. What is not finite is refused and counted.
#pragma once
#include <functional>
#include <memory>
#include <vector>

#include "core/tensor.h"
#include "dist/asynchrony.h"
#include "dist/channel.h"

namespace tandem {

struct ServerOptions {
  Asynchrony how = {};
  int servers = 0;  // ranks 0 … servers − 1 hold shards; 0: all
  double momentum = 0.9;
  std::function<double(std::int64_t samples)> learning_rate = {};  // after so many samples were applied
  std::int64_t chunk = 256 << 10;                             // elements of a message
  double deadline = 300;                                      // seconds that any wait may last
};

// Where the shards begin: server s has [cuts[s], cuts[s + 1]), a multiple of 1024 elements but for the last.
std::vector<std::int64_t> shard_cuts(std::int64_t elements, int servers);

class Member {
 public:
  struct Counts {                                // of this rank's shard, and of this worker
    std::uint64_t version = 0;                   // updates applied
    std::int64_t samples = 0;                    // in them
    std::vector<std::int64_t> delays;            // delays[τ]: pushes that were so late
    std::vector<std::int64_t> applied, refused;  // of each worker
    std::int64_t bytes = 0;                      // sent
    double waited = 0;                           // seconds this worker waited for answers
  };

  // first: the weights at the beginning, the same on all ranks, f32 or f64 in the host's memory. scales: of the learning rate,
  // one for each 64 elements. learning_rate is called by the member's thread.
  Member(std::unique_ptr<Channel> channel, const Tensor& first, std::vector<float> scales, ServerOptions options);
  ~Member();

  // One training thread. Each throws CommunicationError once something is wrong with another rank.
  void push(const Tensor& gradient, std::int64_t samples);
  void pull(Tensor& weights);
  // How many samples are applied, as the servers last said: the least of them.
  std::int64_t samples_applied() const;
  // No push comes from here any more. Waits for all workers to say so.
  void finish(Tensor& weights);
  Counts counts() const;

 private:
  class Thread;
  std::unique_ptr<Thread> thread_;
};

}  // namespace tandem
