// How the vector of a parameter server is cut into shards, and which rank does what: the same at all ranks. Shards are
// of the parameters, but for the last one, where there are running statistics: it holds these, and rank 0 owns it.
#pragma once
#include <cstdint>
#include <vector>

#include "dist/collectives/communicator.h"
#include "dist/server/server.h"

namespace tandem {

struct ServerLayout {
  // Throws UsageError where nobody would be left to train.
  ServerLayout(ServerOptions options, int ranks, DType dtype, std::int64_t parameters, std::int64_t buffers);

  const ServerOptions options;
  const int ranks;
  const DType dtype;
  const std::int64_t parameters, buffers;  // elements; of the statistics a multiple of 64, the end of which is empty
  const std::vector<std::int64_t> cuts;    // shard s has [cuts[s], cuts[s + 1])

  std::vector<int> owner;  // of each shard. Changes when one is lost; the member's thread alone looks at it

  int workers() const { return ranks - options.servers; }  // the first ranks
  int shards() const { return int(cuts.size()) - 1; }
  bool of_parameters(int s) const { return cuts[std::size_t(s) + 1] <= parameters; }
  std::int64_t begin(int s) const { return cuts[std::size_t(s)]; }
  int first_shard() const {  // the first one with elements
    int s = 0;
    while (s + 1 < shards() && length(s) == 0) s++;
    return s;
  }
  std::int64_t length(int s) const { return cuts[std::size_t(s) + 1] - cuts[std::size_t(s)]; }
  std::int64_t whole() const { return cuts.back(); }  // elements of all shards
  std::size_t bytes(std::int64_t numel) const { return std::size_t(numel) * size_of(dtype); }
  // Of a vector of all shards, this one's part.
  Buffer part(void* vector, int s) const {
    return {static_cast<std::byte*>(vector) + bytes(begin(s)), length(s), dtype};
  }
  DType pushed_as(int s) const {  // gradients, on the wire
    return of_parameters(s) ? wire() : dtype;
  }
  DType wire() const { return options.wire == DType::bf16 && dtype == DType::f32 ? DType::bf16 : dtype; }

  // What an owner sends to its successor every options.snapshots seconds, at most, and what a rank needs for that: a
  // copy that is under way, and of another owner's the last one and the next.
  std::size_t snapshot_bytes() const;
  std::size_t snapshot_memory() const { return 3 * snapshot_bytes(); }
  int first_owner(int s) const;
  // Who takes the place of that rank: the next one that serves, or where none is left the next one at all.
  int successor(int rank, const std::vector<bool>& living) const;
};

// Of each 64 elements of the parameters: by how much the learning rate is multiplied. Frozen ones have 0.
std::vector<float> learning_rate_scales(const FlatParameters& flat);

}  // namespace tandem
