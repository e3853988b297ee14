// Channels for ranks that are threads of a test, with faults: ranks that die and rejoin, messages that overtake each
// other.
#pragma once
#include "dist/server/server.h"
#include "tests/ranks.h"

namespace tandem::test {

struct ChannelFaults {
  struct Death {
    int rank;
    // its at-th call of send(), from 0, throws Killed; the other ranks then lose it. The count continues when it
    // rejoins
    std::int64_t at;
  };
  std::vector<Death> deaths = {};
  std::uint64_t delays = 0;   // seed; messages of different senders overtake each other. 0: no delays
  bool duplicates = false;    // with delays: sometimes a message without bytes arrives again, after others
  bool shared_memory = true;  // false: no rank reaches another's memory, as between hosts
};

// Channels for ranks that are threads. A message is sent when its bytes are in the receiver's memory; bytes that
// nothing keeps are copied by send(). A channel that is destroyed during an exception counts as a lost rank.
std::vector<std::unique_ptr<Channel>> in_process_channels(int ranks, const ChannelFaults& faults = {});
// A lost rank rejoins with a new channel. `other`: any channel of the job, which may be in use at the same time.
std::unique_ptr<Channel> in_process_return(Channel& other, int rank);

// One rank of a server, with its vectors in host memory.
struct Rank {
  Rank(std::unique_ptr<Channel> channel, std::int64_t numel, double deadline = 30, ServerNode::Notify notify = {})
      : weights(Tensor::zeros(*backend, {numel})),
        buffers(Tensor::zeros(*backend, {64})),
        gradient(Tensor::full(*backend, {numel}, 1)),
        node(std::move(channel), deadline, std::move(notify)) {}
  void begin(ServerOptions options, WorkLeases leases) {
    if (!options.learning_rate) options.learning_rate = [](std::int64_t) { return 1.0; };
    node.begin(whole(weights), whole(buffers), std::vector<RuleBlock>(std::size_t(weights.numel() / 64)),
               std::move(options), std::move(leases));
  }
  // Where the owners of this host read it.
  void share_gradient(DType dtype) {
    auto memory = node.memory(weights.numel() * size_of(dtype));
    gradient = Tensor::wrap(*backend, memory.get(), weights.shape(), dtype, memory);
  }
  bool pull() { return node.pull(whole(weights), whole(buffers)); }
  bool push_and_pull(const MetricSums& sums = {}) {
    node.push(whole(gradient), whole(buffers), 16, sums);
    return pull();
  }
  // step(lease) fills in the gradient of every lease; made() follows its push.
  template <class Step>
  void train(const Step& step, const MetricSums& sums = {}, const std::function<void()>& made = {}) {
    if (node.trains()) pull();
    while (const auto lease = node.lease()) {
      step(*lease);
      push_and_pull(sums);
      if (made) made();
    }
    node.finish(whole(weights), whole(buffers));
  }
  std::unique_ptr<Backend> backend = reference_backend(1);
  Tensor weights, buffers, gradient;
  ServerNode node;
};

}  // namespace tandem::test
