// FailOvers: how this rank comes by the shards of an owner that was lost. Everybody who lives offers the copy with
// which it was answered last; the newest of them becomes the shard, so that what any living worker was told is applied
// is in it. What the rule keeps beside the weights (velocities) is in no answer: owners send it every few seconds to
// the one who would take their place, and what came since is lost.
//
// The member's thread alone.
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
    std::vector<std::vector<std::byte>> kept;  // Shard::kept(); empty: no snapshot has come
  };
  FailOvers(const ServerLayout& layout, SendQueue& send_queue);

  void begin(int s);    // layout.owner[s] is this rank now; its own offer comes like the others'
  void lost(int rank);  // it offers nothing more

  // Messages. place: nothing where nobody waits for it.
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
    std::map<int, Offer> offers;  // some may come before this rank has heard of the loss
    int from = -1;                // whose copy is coming
    std::int64_t arrived = 0;     // of it; elements
    std::vector<std::byte> values;
  };
  struct Snapshot {
    int from = -1;             // whose is coming
    std::uint64_t number = 0;  // and its number; 0: none
    std::vector<std::vector<std::byte>> coming, kept;
    std::int64_t missing = 0;  // elements, of all its vectors
  };
  void choose(int s), finish(int s);

  const ServerLayout& layout_;
  SendQueue& send_queue_;
  std::vector<FailOver> fail_overs_;  // by shard
  std::vector<Snapshot> snapshots_;
  std::vector<TakenOver> finished_;
};

}  // namespace tandem
