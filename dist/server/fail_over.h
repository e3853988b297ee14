// FailOvers: how this rank takes over the shards of a lost owner. Every live rank offers the copy that it last received
// as an answer. The newest copy becomes the shard, so it contains every push that was confirmed to a live worker.
// Answers do not contain the vectors that the rule keeps beside the weights (velocities). Owners send these to their
// successors every few seconds; later changes are lost.
//
// Threads: the member's thread only.
#pragma once
#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "dist/server/send_queue.h"
#include "dist/server/server_layout.h"
#include "dist/server/server_messages.h"

namespace tandem {

class FailOvers {
 public:
  struct TakenOver {
    int shard;
    ShardState state;
    std::vector<std::byte> values;
    std::vector<std::vector<std::byte>> kept;  // Shard::kept(); empty: no snapshot has arrived
  };
  FailOvers(const ServerLayout& layout, SendQueue& send_queue);

  void begin(int s);    // this rank is now layout.owner[s]; its own offer arrives as a message like the others
  void lost(int rank);  // no more offers come from it

  // Messages. place: returns nothing if no fail-over waits for the copy.
  void offered(int from, const MessageHeader& n, std::vector<ExchangeId> applied);
  std::optional<std::span<std::byte>> place(int from, const MessageHeader& n, std::size_t bytes);
  void copy_part(int from, const MessageHeader& n, std::int64_t numel);
  std::vector<TakenOver> finished();  // since the last call
  void snapshot_part(const MessageHeader& n, std::int64_t numel);

 private:
  struct Offer {
    bool has = false;
    ShardState state;
  };
  struct FailOver {
    bool under_way = false;
    std::map<int, Offer> offers;  // some may arrive before this rank has learned of the loss
    int from = -1;                // the rank whose copy is being received
    std::int64_t arrived = 0;     // elements of it that have arrived
    std::vector<std::byte> values;
  };
  struct Snapshot {
    int from = -1;             // the rank whose snapshot is being received
    std::uint64_t number = 0;  // the number of that snapshot; 0: none
    std::vector<std::vector<std::byte>> coming, kept;
    std::int64_t missing = 0;  // elements that have not arrived, of all its vectors
  };
  void choose(int s), finish(int s);

  const ServerLayout& layout_;
  SendQueue& send_queue_;
  std::vector<FailOver> fail_overs_;  // by shard
  std::vector<Snapshot> snapshots_;
  std::vector<TakenOver> finished_;
};

}  // namespace tandem
