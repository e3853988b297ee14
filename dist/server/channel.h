// Channel: messages that are delivered by their header. Workers and servers of the parameter server have no fixed order
// of calls. A message is a header and some bytes; the receiver chooses from the header the memory for the bytes. Ranks
// of one host share memory: bytes in it are not sent, the receiver reads them where they are. There is an in-process
// and a UCX implementation.
//
//   channel->on_message({.place = [&](int from, const MessageHeader& header, std::size_t bytes) { … },
//                        .arrived = [&](int from, const MessageHeader& header, std::span<std::byte> bytes) { … }});
//   channel->send(server, header, bytes);
//
// That a message was sent does not mean that the receiver has applied it; answers confirm that. Threads: one at a time.
// The callbacks run inside progress(). A callback must not call progress() or rest().
#pragma once
#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "dist/collectives/communicator.h"

namespace tandem {

// The first eight words of a message. Sender and receiver define their meaning.
using MessageHeader = std::array<std::uint64_t, 8>;

struct Receiver {
  // Returns memory for `bytes` bytes that lives until `arrived`. If it is shorter, the message is refused and the job
  // fails with an error text. If it returns nothing, the bytes are valid only during `arrived`.
  std::function<std::optional<std::span<std::byte>>(int from, const MessageHeader& header, std::size_t bytes)> place;
  std::function<void(int from, const MessageHeader& header, std::span<std::byte> bytes)> arrived;
  // Called instead of `place` and `arrived`: the bytes are the sender's memory, which it got from share(). It is
  // reachable until this channel is destroyed, also after the sender is lost.
  std::function<void(int from, const MessageHeader& header, std::span<std::byte> bytes)> shared = {};
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

  // `to` may be this rank. keep: owns the bytes until they are sent; null: they must stay unchanged until sent() is
  // true. Bytes in memory of share() are kept by the channel, and not sent to a rank that reaches them: the messages
  // between the ranks decide how long they must stay unchanged.
  virtual void send(int to, const MessageHeader& header, std::span<const std::byte> bytes = {},
                    std::shared_ptr<const void> keep = {}) = 0;
  virtual bool sent() const = 0;  // no message is on its way out of this rank's memory
  // From now on it is no error if a rank has left while this rank still sends to it.
  void tolerate_losses() { tolerates_losses_ = true; }
  std::int64_t bytes_sent() const { return bytes_sent_; }  // to others; any thread

  virtual bool progress() = 0;  // true if a message has arrived. Throws CommunicationError
  virtual void rest() = 0;      // sleeps until an event may have occurred, at most a few milliseconds
  virtual void wake() = 0;      // any thread

  // Zeroed memory that other ranks of this host can read and write. Any thread.
  std::shared_ptr<void> share(std::size_t bytes);
  // True if this rank reaches that rank's shared memory, which means that the other rank also reaches this rank's.
  // False while that rank has shared none.
  virtual bool reaches(int rank) = 0;

  // Fails the channel and sends the reason to the other ranks: their calls throw this text.
  virtual void fail(int culprit, const std::string& text) = 0;

 protected:
  virtual std::shared_ptr<void> new_block(std::size_t bytes) = 0;  // of shared memory; numbered 0, 1, … in this order
  struct Place {
    std::shared_ptr<void> memory;
    std::uint64_t block, offset;
  };
  std::optional<Place> place_of(const void* p) const;  // in this rank's shared memory

  bool tolerates_losses_ = false;
  std::atomic<std::int64_t> bytes_sent_{0};

 private:
  struct Block {
    const std::byte* begin;
    std::size_t bytes;
    std::weak_ptr<void> memory;
  };
  mutable std::mutex blocks_mutex_;
  std::vector<Block> blocks_;  // by number
};

// The channel of a job of one rank.
std::unique_ptr<Channel> channel_of_one();

}  // namespace tandem
