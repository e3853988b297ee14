// Worker: a worker's side of the parameter server, its exchange under way. A gradient goes to the owners of all shards,
// in parts or, where they reach it, by the name of the place in which it lies; their answers land here. When all are
// there the exchange is over, and the training thread takes the weights. Parts may be sent while the rest of the
// gradient is computed; owners keep them until start() tells them to apply the whole.
//
// Answers land in one of two halves by turns. So the other one still has a whole copy of each shard, the newest that
// this worker was answered with, while the next answer lands: where an owner dies, somebody goes on with such a copy.
//
// An owner of this host writes its answers there itself. One that is given up may only be stopped, and write when it
// wakes up: so each owner of a shard has memory of its own to write to, and that of a lost one is read by nobody any
// more.
//
// A rank that only serves has one too; it starts no exchange, and has no copies to offer.
//
// Threads: the first part is the training thread's, while no exchange is under way; the rest is the member's thread's.
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
    const void* gradient = nullptr;  // null: for the weights alone
    std::int64_t samples = 0, lease = -1;
    MetricSums sums = {};
    ExchangeId id = 0;                        // set by start()
    Verdict verdict = Verdict::taken;         // the worst of all owners; dropped: by the first shard
    int half() const { return int(id & 1); }  // where its answer lands
  };
  // Shares memory with the other ranks of this host.
  Worker(const ServerLayout& layout, SendQueue& send_queue);

  void keep_first(Buffer parameters, Buffer buffers);  // rank 0's: what training begins with, as if answered so
  void keep_buffers(Buffer buffers);                   // to be pushed with the next gradient
  void copy_answer(int half, Buffer parameters, Buffer buffers) const;

  // Rank 0: to all owners. velocity: as long as all shards, or empty: zero.
  void send_first(std::vector<std::byte> velocity);
  // This part of the next exchange's gradient, elements of all parameters, will not change any more. What comes of it
  // is start()'s to say; where no gradient is started after it, owners forget it.
  void send_early(const void* gradient, Range part);
  bool sends_parts() const;  // to an owner that does not reach this rank's memory
  void start(Exchange exchange);
  void ask_for_lease();
  // It answers the last request, and nothing with a lease did so far. Without a lease, and with none in hand, this
  // worker is idle after the exchange under way.
  bool awaits(const MessageHeader& lease_is);
  void be_idle();  // after the exchange under way: nothing is pushed until the next start()
  // Under a quorum, now and then: shards that have answered hear when this worker waits for others. Otherwise two of
  // them could each wait for the push of a worker that waits for the other.
  void tell_blocked(double now);
  void owner_changed(int s);      // its owner was lost, and layout.owner names another
  void ask_velocity(void* into);  // into: as long as the parameters

  // Messages to this worker. place: nothing where nobody waits for it any more. The answers: true when the exchange is
  // over.
  std::optional<std::span<std::byte>> place(const MessageHeader& n, std::size_t bytes);
  bool answer_part(const MessageHeader& n, std::int64_t numel);
  bool answer_ended(const MessageHeader& n, std::vector<ExchangeId> applied);  // answer_end, answer_here
  void copy_wanted(int from, int s);
  bool velocity_part(int s, std::int64_t numel);  // true: all of what ask_velocity() asked for is here

  const Exchange& exchange() const { return exchange_; }
  std::string missing() const;  // of whom it waits for an answer, by name

 private:
  struct Answer {             // what has come of one, for a shard
    std::int64_t landed = 0;  // elements
    bool ended = false;       // which may come before the last part
    bool complete = false;
    double at = 0;              // when it was
    bool told_blocked = false;  // its owner
    Verdict verdict = Verdict::taken;
    ShardState state = {};
  };
  struct Copy {
    int half;
    ShardState state;
  };
  struct ReceiveBuffer {  // where the answers of a shard's owner land: two halves, each as long as the shard
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
  Buffer pushed(int s) const;                        // what a push has for this shard, as it travels
  bool in_reach(int s, const Buffer& pushed) const;  // of the owner: it lies in memory that both share
  void send_part(int s, Range part);                 // elements of the shard
  std::vector<Range> not_sent(int s) const;
  bool look(int s);  // is this answer complete, and with it the exchange?
  void tell_idle(int s), tell_blocked(int s, bool is);
  void ask_velocity_of(int s);

  const ServerLayout& layout_;
  SendQueue& send_queue_;
  mutable std::mutex mutex_;  // of receive_buffers_: the training thread takes an answer while an owner is lost
  std::vector<ReceiveBuffer> receive_buffers_;  // by shard
  std::vector<ReceiveBuffer> left_to_the_lost_;
  std::shared_ptr<void> buffers_out_;  // to be pushed
  std::vector<bf16> narrow_;           // the gradient as it travels, where it travels as bf16

  Exchange exchange_;
  bool deferred_ = false;                 // parts of it are on their way, and it is not started
  std::vector<std::vector<Range>> sent_;  // by shard: parts of its gradient
  std::uint64_t exchanges_ = 0;
  std::vector<Answer> answers_;  // by shard
  int missing_ = 0;              // of them are not complete
  std::vector<std::optional<Copy>> copies_;
  bool idle_ = false;
  std::uint64_t requests_ = 0, service_ = 0;  // for leases; the last that was answered with one
  int leases_ = 0;                            // that are not pushed yet
  bool no_more_ = false;                      // leases, for now
  std::byte* velocity_into_ = nullptr;
  std::vector<std::int64_t> velocity_missing_;  // elements, by shard
};

}  // namespace tandem
