// SendQueue: what a member of a parameter server has to do with its channel, apart from hearing. Messages stay here,
// with the memory that their bytes lie in, until they have gone. Memory that the ranks of a host share is known here
// too: what lies in it is named, and not sent.
#pragma once
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "dist/server/channel.h"

namespace tandem {

class SendQueue {
 public:
  explicit SendQueue(Channel& channel) : channel_(channel) {}

  int rank() const { return channel_.rank(); }
  int ranks() const { return channel_.size(); }
  std::uint64_t incarnation() const { return channel_.incarnation(); }
  std::string where(int rank) const { return channel_.where(rank); }
  std::vector<bool> living() const { return channel_.living(); }

  // keep: what the bytes lie in, until they have gone; null: the caller's, which stays.
  void send(int to, const MessageHeader& header, std::span<const std::byte> bytes = {},
            std::shared_ptr<const void> keep = {});
  // A part of a shard's vector, which begins at note[word::first], in messages of `chunk` elements that say where each
  // begins.
  void send_parts(int to, MessageHeader header, Buffer part, std::int64_t chunk,
                  const std::shared_ptr<const void>& keep = {});
  void let_go();  // of what has gone; the channel may deliver messages meanwhile
  bool empty() const { return sends_.empty(); }
  // From now on it is no error when a rank has left that this one still has something to say to, of a loss for example.
  // If there is more to it, the channel's progress() says so.
  void forgive() { forgives_ = true; }
  std::int64_t bytes_sent() const { return bytes_; }  // to others; any thread

  // Memory that others of this host may reach, zeroed. Any thread.
  std::shared_ptr<void> share(std::size_t bytes);
  struct Place {
    std::uint64_t block, offset;
  };
  std::optional<Place> place_of(const void* p) const;    // in this rank's shared memory
  std::shared_ptr<void> memory_of(const void* p) const;  // the block that it lies in; null: none, or it is given back
  // Its shared memory, and it this rank's.
  bool reaches(int rank, std::uint64_t block = 0) const { return !channel_.shared_by(rank, int(block)).empty(); }
  std::byte* at(int rank, Place place, std::size_t bytes) const;  // throws Error where it is not in reach

 private:
  struct Sending {
    std::shared_ptr<const void> keep;  // outlives the work: who gives that up waits for a reader
    Work work;
  };
  template <class F>
  bool gone_well(const F& f);

  Channel& channel_;
  std::deque<Sending> sends_;
  bool forgives_ = false;
  std::atomic<std::int64_t> bytes_{0};
  struct Block {
    const std::byte* begin;
    std::size_t bytes;
    std::weak_ptr<void> memory;
  };
  mutable std::mutex mutex_;
  std::vector<Block> blocks_;  // by number
};

}  // namespace tandem
