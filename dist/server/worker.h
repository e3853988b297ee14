// Worker: the worker's side of the parameter server, with its exchange in progress. It sends a gradient to the owners
// of all shards, in parts, or as the address of shared memory if they reach it. Their answers arrive here. When all
// answers have arrived, the exchange is over and the training thread takes the weights. Parts may be sent while the
// rest of the gradient is computed. Owners keep them until start() requests them to apply the whole.
//
// Answers are written alternately to two halves. So while the next answer arrives, the other half still has a complete
// copy of each shard, the newest that this worker received. If an owner is lost, its successor continues from such a
// copy.
//
// An owner of this host writes its answers into this memory itself. An owner that was given up may only be stopped, and
// may write after it wakes up. So each owner of a shard has its own block of memory, and the block of a lost owner is
// not read any more.
//
// A rank that only serves also has a Worker, which starts no exchange and has no copies to offer.
//
// Threads: the training thread calls the first group of functions, while no exchange is in progress; the member's
// thread calls the rest.
#pragma once
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "dist/server/send_queue.h"
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
    ExchangeId id = 0;                        // set by start()
    Verdict verdict = Verdict::taken;         // the worst of all owners; `dropped` counts only from the first shard
    int half() const { return int(id & 1); }  // where its answer is written
  };
  // Shares memory with the other ranks of this host.
  Worker(const ServerLayout& layout, SendQueue& send_queue);

  void keep_first(Buffer parameters, Buffer buffers);  // rank 0's initial values, treated like an answer
  void keep_buffers(Buffer buffers);                   // to be pushed with the next gradient
  void copy_answer(int half, Buffer parameters, Buffer buffers) const;

  // Rank 0 sends the initial values to all owners. velocity: as long as all shards; empty: zero.
  void send_first(std::vector<std::byte> velocity);
  // This range of the next exchange's gradient, in elements of all parameters, is final and is sent. start() decides
  // whether it is applied. If no gradient is started after it, owners discard it.
  void send_early(const void* gradient, Range part);
  bool sends_parts() const;  // to an owner that does not reach this rank's memory
  void start(Exchange exchange);
  void ask_for_lease();
  // True if this message answers the last request, and no earlier answer to that request had a lease. If it has no
  // lease and this worker holds none, the worker is idle after the current exchange.
  bool awaits(const MessageHeader& lease_is);
  void be_idle();  // no push follows the current exchange until the next start()
  // Under a quorum, called periodically: reports to shards that have answered that this worker waits for others.
  // Otherwise two shards could each wait for the push of a worker that waits for the other shard.
  void tell_blocked(double now);
  void owner_changed(int s);      // its owner was lost; layout.owner has the new one
  void ask_velocity(void* into);  // into: as long as the parameters

  // Messages to this worker. place: returns nothing if the message is no longer expected. answer_part() and
  // answer_ended() return true if the exchange is over.
  std::optional<std::span<std::byte>> place(const MessageHeader& n, std::size_t bytes);
  bool answer_part(const MessageHeader& n, std::int64_t numel);
  bool answer_ended(const MessageHeader& n, std::vector<ExchangeId> applied);  // answer_end, answer_here
  void copy_wanted(int from, int s);
  bool velocity_part(int s, std::int64_t numel);  // true: all that ask_velocity() requested has arrived

  const Exchange& exchange() const { return exchange_; }
  std::string missing() const;  // the owners whose answers are missing, by name

 private:
  struct Answer {             // the state of one answer, for a shard
    std::int64_t landed = 0;  // elements
    bool ended = false;       // the end may arrive before the last part
    bool complete = false;
    double at = 0;              // when it was complete
    bool told_blocked = false;  // its owner was told that this worker is blocked
    Verdict verdict = Verdict::taken;
    ShardState state = {};
  };
  struct Copy {
    int half;
    ShardState state;
  };
  struct ReceiveBuffer {  // memory for the answers of a shard's owner: two halves, each as long as the shard
    std::shared_ptr<void> memory;
    std::uint64_t block;
  };
  ReceiveBuffer receive_buffer(int s);
  Buffer half(int h, int s) const {
    return {
        static_cast<std::byte*>(receive_buffers_[std::size_t(s)].memory.get()) + layout_.bytes(h * layout_.length(s)),
        layout_.length(s), layout_.dtype};
  }
  ExchangeId numbered(std::uint64_t count) const;
  bool waits_for(const MessageHeader& n) const {
    return n[word::number] == exchange_.id && !answers_[n[word::shard]].complete;
  }
  void send(int s);
  Buffer pushed(int s) const;                        // the data of a push for this shard, as it is sent
  bool in_reach(int s, const Buffer& pushed) const;  // by the owner: the data is in memory that both share
  void send_part(int s, Range part);                 // elements of the shard
  std::vector<Range> not_sent(int s) const;
  bool look(int s);  // checks whether this answer, and with it the exchange, is complete
  void tell_idle(int s), tell_blocked(int s, bool is);
  void ask_velocity_of(int s);

  const ServerLayout& layout_;
  SendQueue& send_queue_;
  mutable std::mutex mutex_;  // for receive_buffers_: an owner may be lost while the training thread takes an answer
  std::vector<ReceiveBuffer> receive_buffers_;  // by shard
  std::vector<ReceiveBuffer> left_to_the_lost_;
  std::shared_ptr<void> buffers_out_;  // to be pushed
  std::vector<bf16> narrow_;           // the gradient as it is sent, if it is sent as bf16

  Exchange exchange_;
  bool deferred_ = false;                 // parts of the next gradient were sent, and start() was not called
  std::vector<std::vector<Range>> sent_;  // by shard: the sent ranges of the gradient
  std::uint64_t exchanges_ = 0;
  std::vector<Answer> answers_;  // by shard
  int missing_ = 0;              // answers that are not complete
  std::vector<std::optional<Copy>> copies_;
  bool idle_ = false;
  std::uint64_t requests_ = 0, service_ = 0;  // lease requests: the last, and the last that was answered with a lease
  int leases_ = 0;                            // that are drawn and not pushed yet
  bool no_more_ = false;                      // no lease is available now
  std::byte* velocity_into_ = nullptr;
  std::vector<std::int64_t> velocity_missing_;  // elements, by shard
};

}  // namespace tandem
