// Channel: messages that go where their header says. The parameter server's workers and servers are bound to no order
// of calls: a message is a header and some bytes, and the one who receives it says, from the header, which memory the
// bytes go to. In-process and UCX twins; both strict about memory: it is the caller's until the send is done.
//
//   channel->on_message({.place = [&](int from, const MessageHeader& header, std::size_t bytes) { return
//   room_for(note); },
//                        .arrived = [&](int from, const MessageHeader& header, std::span<std::byte> bytes) { … }});
//   channel->send(server, header, bytes).wait();
//
// A send that is done has left this rank's memory; it has not been applied anywhere: answers say that. Threads: one at
// a time; the callbacks run inside progress(), wait() and done(), and must not call the channel's own functions except
// send().
#pragma once
#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "dist/collectives/communicator.h"

namespace tandem {

// The first eight words of a message; what they mean is its sender's and receiver's matter.
using MessageHeader = std::array<std::uint64_t, 8>;

struct Receiver {
  // Memory for `bytes` bytes, alive until `arrived`; shorter: the message is refused, and the job fails with a text.
  // None: the message is `unplaced`.
  std::function<std::optional<std::span<std::byte>>(int from, const MessageHeader& header, std::size_t bytes)> place;
  std::function<void(int from, const MessageHeader& header, std::span<std::byte> bytes)> arrived;
  // In place of `arrived`: the bytes lie in memory that is the receiver's now.
  std::function<void(int from, const MessageHeader& header, std::vector<std::byte> bytes)> unplaced = {};
  // A rank is gone, and the job goes on without it: nothing of it arrives after this call, and what was under way to it
  // counts as done. All ranks hear of losses (and returns) in the same order. Without this the job fails when a rank is
  // lost; it always does when that is rank 0, which keeps the list.
  std::function<void(int rank, const std::string& why)> lost = {};
  // A rank that was lost is there again, as a new process that knows nothing; incarnation: the number of the
  // return, from 1. On the rank that has come back this is not called.
  std::function<void(int rank, std::uint64_t incarnation)> returned = {};
};

class Channel {
 public:
  virtual ~Channel() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::string where(int rank) const = 0;           // "rank 2 on node7"
  virtual std::uint64_t incarnation() const { return 0; }  // of this process; 0: it was there from the beginning
  virtual std::vector<bool> living() const = 0;            // by rank, as the callbacks have told it so far
  // Losses and returns of the job so far, as the callbacks have told them: the same number at all ranks, also at one
  // that has come back.
  virtual std::uint64_t generation() const = 0;
  virtual void on_message(Receiver receiver) = 0;  // before any message comes; messages wait until then
  // `to` may be this rank
  virtual Work send(int to, const MessageHeader& header, std::span<const std::byte> bytes = {}) = 0;
  virtual bool progress() = 0;  // true when a message has arrived. Throws CommunicationError
  virtual void rest() = 0;      // sleeps until something may have happened, or a few milliseconds
  virtual void wake() = 0;      // any thread

  // Zeroed memory that other ranks of this host can read and write: none of its bytes need to be sent to them. Blocks
  // are numbered 0, 1, … in the order of the calls. Any thread, before messages about it.
  virtual std::shared_ptr<void> share(std::size_t bytes) = 0;
  // That rank's block `number`, alive as long as this channel, also after the rank was lost (until it returns: then its
  // new blocks); empty where its memory is not in reach, on another host for example.
  virtual std::span<std::byte> shared_by(int rank, int number) = 0;

  // Gives up, and tells the other ranks why: their calls throw this text.
  virtual void fail(int culprit, const std::string& text) = 0;
};

// What goes wrong with ranks that are threads, for the tests.
struct ChannelFaults {
  struct Death {
    int rank;
    std::int64_t at;  // throws Killed out of its at-th call of send(), from 0, and is then lost to the others; the
                      // count goes on when it returns
  };
  std::vector<Death> deaths = {};
  std::uint64_t delays = 0;       // seed; messages of different senders overtake each other. 0: they do not
  bool duplicates = false;        // with delays: now and then one without bytes comes again, after others
  bool shared_memory = true;      // false: shared_by() is always empty, as between hosts
  std::int64_t* sends = nullptr;  // counts calls of send() over all ranks, when all are gone
};

// Ranks that are threads. A send is done when its bytes are in the receiver's memory. A channel that is destroyed while
// an exception is in flight counts as a death.
std::vector<std::unique_ptr<Channel>> in_process_channels(int ranks, double deadline = 300,
                                                          const ChannelFaults& faults = {});
// A rank that was lost comes back, with a fresh channel; `other`: any channel of the job, which may be in use
// meanwhile.
std::unique_ptr<Channel> in_process_return(Channel& other, int rank);

}  // namespace tandem
