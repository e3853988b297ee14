// How the vector of a parameter server is divided into shards, and the role of each rank; the same on all ranks. Shards
// contain parameters. If there are running statistics, the last shard contains these, and rank 0 owns it.
#pragma once
#include <cstdint>
#include <vector>

#include "dist/collectives/communicator.h"
#include "dist/server/shard_service.h"
#include "layers/optim/flat_parameters.h"

namespace tandem {

// Where the shards begin: server s has [cuts[s], cuts[s + 1]). The length is a multiple of 1024 elements except for the
// last.
std::vector<std::int64_t> shard_cuts(std::int64_t numel, int servers);

struct ServerLayout {
  // Throws UsageError if no rank would train.
  ServerLayout(ServerOptions options, int ranks, DType dtype, std::int64_t parameters, std::int64_t buffers);

  const ServerOptions options;
  const int ranks;
  const DType dtype;
  const std::int64_t parameters, buffers;  // elements; buffers: padded to a multiple of 64
  std::vector<std::int64_t> cuts;          // shard s has [cuts[s], cuts[s + 1])

  std::vector<int> owner;  // of each shard; changes when an owner is lost. Used by the member's thread only

  int workers() const { return ranks - options.servers; }  // the first ranks
  int shards() const { return int(cuts.size()) - 1; }
  bool of_parameters(int s) const { return cuts[std::size_t(s) + 1] <= parameters; }
  std::int64_t begin(int s) const { return cuts[std::size_t(s)]; }
  int first_shard() const {  // the first shard that is not empty
    int s = 0;
    while (s + 1 < shards() && length(s) == 0) s++;
    return s;
  }
  std::int64_t length(int s) const { return cuts[std::size_t(s) + 1] - cuts[std::size_t(s)]; }
  std::int64_t whole() const { return cuts.back(); }  // elements of all shards together
  std::size_t bytes(std::int64_t numel) const { return std::size_t(numel) * size_of(dtype); }
  // The part of shard s in a vector of all shards.
  Buffer part(void* vector, int s) const {
    return {static_cast<std::byte*>(vector) + bytes(begin(s)), length(s), dtype};
  }
  DType pushed_as(int s) const {  // type of pushed gradients on the wire
    return of_parameters(s) ? wire() : dtype;
  }
  DType wire() const { return options.wire == DType::bf16 && dtype == DType::f32 ? DType::bf16 : dtype; }

  // The size of a copy of shard s: its weights, and for each worker its last applied exchange.
  std::size_t copy_bytes(int s) const { return bytes(length(s)) + std::size_t(workers()) * sizeof(ExchangeId); }

  // The bytes that an owner sends to its successor, at most every options.snapshots seconds; and the memory that a rank
  // needs for that: its own snapshot in transit, and another owner's last snapshot and next one.
  std::size_t snapshot_bytes() const;
  std::size_t snapshot_memory() const { return 3 * snapshot_bytes(); }
  // The rank that replaces `rank`: the next live rank that serves, or if none is left the next live rank.
  int successor(int rank, const std::vector<bool>& living) const;
};

// For each 64 elements of the parameters. scaled: with the learning-rate factors of the parameters, 0 where frozen;
// otherwise all are 1.
std::vector<RuleBlock> rule_blocks(const FlatParameters& flat, bool scaled = true);

}  // namespace tandem
