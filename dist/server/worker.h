// Worker: the worker's side of the parameter server, with its exchange in progress. It sends a gradient to the owners
// of all shards, and their answers arrive here. When all have arrived, the exchange is over and the training thread
// takes the weights. Parts may be sent while the rest of the gradient is computed. Owners stage them until start()
// confirms the whole gradient.
//
// The last answer of each shard stays as it is until the next one has arrived: it is the newest copy of the shard that
// this worker received. If an owner is lost, its successor continues from such a copy. An owner of this host writes its
// answers into memory of its own that this rank reads (shard_server.h). So an owner that was given up, but is only
// stopped and wakes up, changes nothing that is still read. Answers of other hosts are received alternately in two
// halves of a buffer.
//
// A rank that only serves also has a Worker, which starts no exchange and has no copies to offer.
//
// Threads: the training thread calls the first group of functions, while no exchange is in progress; the member's
// thread calls the rest.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dist/server/server_layout.h"
#include "dist/server/server_messages.h"
#include "layers/train/strategy.h"

namespace tandem {

class Worker {
 public:
  struct Exchange {
    const void* gradient = nullptr;  // null: requests only the weights
    std::int64_t samples = 0, lease = -1;
    MetricSums sums = {};
    ExchangeId id = 0;                 // set by start()
    Verdict verdict = Verdict::taken;  // the worst of all owners; `dropped` counts only from the first shard
  };
  Worker(const ServerLayout& layout, Channel& channel);

  // Rank 0's initial values, treated like an answer. velocity: as long as the parameters; empty: zero.
  void keep_first(Buffer parameters, Buffer buffers, Buffer velocity);
  void keep_buffers(Buffer buffers);  // to be pushed with the next gradient
  void copy_answers(Buffer parameters, Buffer buffers) const;

  void send_first();  // rank 0 sends the initial values to all owners
  // This range of the next exchange's gradient, in elements of all parameters, is final and is sent. start() with a
  // gradient confirms it; start() without one makes the owners discard it.
  void push_part(const void* gradient, Range part);
  bool sends_parts() const;  // an owner does not reach this rank's memory, or gradients are sent as bf16
  void start(Exchange exchange);
  void ask_for_lease();
  // True if this message answers the last request, and no earlier answer to that request had a lease. If it has no
  // lease and this worker holds none, the worker is idle after the current exchange.
  bool awaits(const message::LeaseIs& lease);
  void be_idle();  // no push follows the current exchange until the next start()
  // Under a quorum, called periodically: reports to shards that have answered that this worker waits for others.
  // Otherwise two shards could each wait for the push of a worker that waits for the other shard.
  void report_waiting(double now);
  void owner_changed(std::uint64_t s);  // its owner was lost; layout.owner has the new one
  void ask_velocity(void* into);        // into: as long as the parameters

  // Memory for the bytes of an answer; nothing if it is not expected any more.
  std::optional<std::span<std::byte>> place(const message::Answer& m, std::size_t bytes);
  // Messages. True: the exchange is over; all of the velocity has arrived.
  bool answered(const message::Answer& m, std::span<std::byte> bytes);
  bool velocity_arrived(const message::Velocity& m, std::span<const std::byte> bytes);
  void copy_wanted(int from, std::uint64_t s);

  const Exchange& exchange() const { return exchange_; }
  std::string missing() const;  // the owners whose answers are missing, by name

 private:
  struct Answer {  // the state of one answer, for a shard
    bool complete = false;
    double at = 0;               // when it was complete
    bool reported_idle = false;  // to its owner, because this worker waits for others
  };
  struct Copy {
    std::span<std::byte> bytes = {};  // none: this rank has no copy
    std::uint64_t version = 0;
    std::int64_t pushes = 0;
    std::shared_ptr<const void> keep = {};  // owns the bytes, of rank 0's initial values
  };
  ExchangeId numbered(std::uint64_t count) const;
  void push(std::uint64_t s), send_idle(std::uint64_t s, Pause pause), ask_velocity_of(std::uint64_t s);
  void send_part(message::Push m, Range part);  // elements of the shard's part of the gradient
  std::vector<Range> not_sent(std::uint64_t s) const;
  int owner(std::uint64_t s) const { return layout_.owner[s]; }
  // A shard's part of the model's vectors. The end of the statistics' shard is unused.
  Buffer model_part(std::uint64_t s, Buffer parameters, Buffer buffers) const;

  const ServerLayout& layout_;
  Channel& channel_;
  const std::uint64_t shards_;
  std::shared_ptr<void> buffers_;              // to be pushed
  std::shared_ptr<std::vector<bf16>> narrow_;  // the gradient as it is sent, if it is sent as bf16

  Exchange exchange_;
  bool begun_ = false;                    // parts of the next gradient were sent, and start() was not called
  std::vector<std::vector<Range>> sent_;  // by shard: the sent ranges of the gradient
  std::uint64_t exchanges_ = 0;
  std::vector<Answer> answers_;                   // by shard
  std::uint64_t missing_ = 0;                     // answers that are not complete
  std::vector<std::vector<std::byte>> received_;  // by shard: two halves, each for a copy
  std::vector<Copy> copies_;                      // by shard
  bool idle_ = false;
  std::uint64_t requests_ = 0, service_ = 0;  // lease requests: the last, and the last that was answered with a lease
  int leases_ = 0;                            // that this worker holds and has not pushed
  bool no_more_ = false;                      // no lease is available now
  void* velocity_into_ = nullptr;
  std::vector<bool> velocity_missing_;  // by shard
};

}  // namespace tandem
