// Channel: messages that are delivered by their header. Workers and servers of the parameter server have no fixed order
// of calls. A message is a header and some bytes; the receiver chooses from the header the memory for the bytes. There
// is an in-process and a UCX implementation. Both are strict about memory: the bytes must stay unchanged until the send
// is done.
//
//   channel->on_message({.place = [&](int from, const MessageHeader& header, std::size_t bytes) { … },
//                        .arrived = [&](int from, const MessageHeader& header, std::span<std::byte> bytes) { … }});
//   channel->send(server, header, bytes).wait();
//
// When a send is done, its bytes have left this rank's memory. It does not mean that the receiver has applied them;
// answers confirm that. Threads: one at a time. The callbacks run inside progress(), wait() and done(). A callback may
// call only send() of the channel.
#pragma once
#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "dist/collectives/communicator.h"

namespace tandem {

// The first eight words of a message. Sender and receiver define their meaning.
using MessageHeader = std::array<std::uint64_t, 8>;

struct Receiver {
  // Returns memory for `bytes` bytes that lives until `arrived`. If it is shorter, the message is refused and the job
  // fails with an error text. If it returns nothing, the message is passed to `unplaced`.
  std::function<std::optional<std::span<std::byte>>(int from, const MessageHeader& header, std::size_t bytes)> place;
  std::function<void(int from, const MessageHeader& header, std::span<std::byte> bytes)> arrived;
  // Called instead of `arrived`; the receiver owns the vector.
  std::function<void(int from, const MessageHeader& header, std::vector<std::byte> bytes)> unplaced = {};
  // A rank is lost and the job continues without it. No message of it arrives after this call, and unfinished sends to
  // it count as done. All ranks receive losses and returns in the same order. Without this callback the job fails when
  // a rank is lost. It always fails when rank 0 is lost, which keeps the list.
  std::function<void(int rank, const std::string& why)> lost = {};
  // A lost rank has rejoined as a new process without state. incarnation: the number of the rejoin, from 1. Not called
  // on the rejoined rank itself.
  std::function<void(int rank, std::uint64_t incarnation)> returned = {};
};

class Channel {
 public:
  virtual ~Channel() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::string where(int rank) const = 0;           // "rank 2 on node7"
  virtual std::uint64_t incarnation() const { return 0; }  // of this process; 0: the rank's first process
  virtual std::vector<bool> living() const = 0;            // by rank, after the callbacks so far
  // The number of losses and returns in the job that the callbacks have reported. All ranks count alike, also a
  // rejoined one.
  virtual std::uint64_t generation() const = 0;
  virtual void on_message(Receiver receiver) = 0;  // call it before the first message; messages wait until then
  // `to` may be this rank
  virtual Work send(int to, const MessageHeader& header, std::span<const std::byte> bytes = {}) = 0;
  virtual bool progress() = 0;  // true if a message has arrived. Throws CommunicationError
  virtual void rest() = 0;      // sleeps until an event may have occurred, at most a few milliseconds
  virtual void wake() = 0;      // any thread

  // Zeroed memory that other ranks of this host can read and write, so its bytes need not be sent to them. Blocks are
  // numbered 0, 1, … in the order of the calls. Any thread may call it, before messages about the block.
  virtual std::shared_ptr<void> share(std::size_t bytes) = 0;
  // Block `number` of that rank. It lives as long as this channel, also after the rank was lost; after a rejoin the new
  // process's blocks are returned. Empty if the memory is not reachable, for example on another host.
  virtual std::span<std::byte> shared_by(int rank, int number) = 0;

  // Fails the channel and sends the reason to the other ranks: their calls throw this text.
  virtual void fail(int culprit, const std::string& text) = 0;
};

// Faults for tests with ranks that are threads.
struct ChannelFaults {
  struct Death {
    int rank;
    // its at-th call of send(), from 0, throws Killed; the other ranks then lose it. The count continues when it
    // rejoins
    std::int64_t at;
  };
  std::vector<Death> deaths = {};
  std::uint64_t delays = 0;       // seed; messages of different senders overtake each other. 0: no delays
  bool duplicates = false;        // with delays: sometimes a message without bytes arrives again, after others
  bool shared_memory = true;      // false: shared_by() is always empty, as between hosts
  std::int64_t* sends = nullptr;  // counts calls of send() of all ranks; set when all channels are destroyed
};

// Channels for ranks that are threads. A send is done when its bytes are in the receiver's memory. A channel that is
// destroyed during an exception counts as a lost rank.
std::vector<std::unique_ptr<Channel>> in_process_channels(int ranks, double deadline = 300,
                                                          const ChannelFaults& faults = {});
// A lost rank rejoins with a new channel. `other`: any channel of the job, which may be in use at the same time.
std::unique_ptr<Channel> in_process_return(Channel& other, int rank);

}  // namespace tandem
