// SendQueue: the sending side of a member of a parameter server. It keeps messages, and the memory of their bytes,
// until they are sent. It also manages memory that the ranks of a host share: data in that memory is named by its place
// and not sent.
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

  // keep: owns the memory of the bytes until they are sent; null: the memory is the caller's and must stay valid.
  void send(int to, const MessageHeader& header, std::span<const std::byte> bytes = {},
            std::shared_ptr<const void> keep = {});
  // Sends a part of a shard's vector, which begins at header[word::first], in messages of `chunk` elements. Each
  // message contains its first element's position.
  void send_parts(int to, MessageHeader header, Buffer part, std::int64_t chunk,
                  const std::shared_ptr<const void>& keep = {});
  void let_go();  // removes sent messages; the channel may deliver messages during the call
  bool empty() const { return sends_.empty(); }
  // From now on it is no error if a rank has left while this rank still sends to it, for example the message of a loss.
  // Other failures are reported by the channel's progress().
  void forgive() { forgives_ = true; }
  std::int64_t bytes_sent() const { return bytes_; }  // to others; any thread

  // Zeroed memory that other ranks of this host may reach. Any thread.
  std::shared_ptr<void> share(std::size_t bytes);
  struct Place {
    std::uint64_t block, offset;
  };
  std::optional<Place> place_of(const void* p) const;    // in this rank's shared memory
  std::shared_ptr<void> memory_of(const void* p) const;  // the block that contains p; null: none, or it was freed
  // True if this rank reaches that rank's shared memory, which means that the other rank also reaches this rank's.
  bool reaches(int rank, std::uint64_t block = 0) const { return !channel_.shared_by(rank, int(block)).empty(); }
  std::byte* at(int rank, Place place, std::size_t bytes) const;  // throws Error if it is not reachable

 private:
  struct Sending {
    // destroyed after `work`: destroying an unfinished Work waits until nothing reads the memory
    std::shared_ptr<const void> keep;
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
