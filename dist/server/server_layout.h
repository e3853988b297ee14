// How the vector of a parameter server is divided into shards, and the role of each rank; the same on all ranks. Shards
// contain parameters. If there are running statistics, the last shard contains these, and rank 0 owns it.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "dist/collectives/communicator.h"
#include "dist/server/rules.h"
#include "dist/server/shard_service.h"
#include "layers/optim/flat_parameters.h"

namespace tandem {

// Where the shards begin: server s has [cuts[s], cuts[s + 1]). The length is a multiple of 1024 elements except for the
// last.
inline std::vector<std::int64_t> shard_cuts(std::int64_t numel, int servers) {
  const std::int64_t blocks = (numel + FlatParameters::cut - 1) / FlatParameters::cut;
  std::vector<std::int64_t> cuts;
  for (int s = 0; s <= servers; s++) cuts.push_back(std::min(numel, blocks * s / servers * FlatParameters::cut));
  return cuts;
}

struct ServerLayout {
  // Throws UsageError if no rank would train.
  ServerLayout(ServerOptions o, int all, DType type, std::int64_t parameter_count, std::int64_t buffer_count)
      : options(std::move(o)),
        ranks(all),
        dtype(type),
        parameters(parameter_count),
        buffers((buffer_count + FlatParameters::alignment - 1) / FlatParameters::alignment *
                FlatParameters::alignment) {
    check_servers(options.servers, ranks);
    const int owners = options.servers ? options.servers : ranks;
    cuts = shard_cuts(parameters, owners);
    for (int s = 0; s < owners; s++) owner.push_back(ranks - owners + s);
    if (!buffers) return;
    cuts.push_back(parameters + buffers);
    owner.push_back(0);
  }

  const ServerOptions options;
  const int ranks;
  const DType dtype;
  const std::int64_t parameters, buffers;  // elements; buffers: padded to a multiple of 64
  std::vector<std::int64_t> cuts;          // shard s has [cuts[s], cuts[s + 1])

  std::vector<int> owner;  // of each shard; changes when one is lost. Used by the member's thread only

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
  std::size_t snapshot_bytes() const {
    if (options.snapshots <= 0 || ranks == 1) return 0;
    const Rule::Keeps keeps = make_rule(options.how.rule)->keeps();
    const std::int64_t vectors = keeps.velocity + (keeps.square_avg + keeps.own) * std::int64_t(workers());
    std::int64_t longest = 0;
    for (int s = 0; s < shards(); s++)
      if (of_parameters(s)) longest = std::max(longest, length(s));
    return bytes(vectors * longest);
  }
  std::size_t snapshot_memory() const { return 3 * snapshot_bytes(); }
  // The rank that replaces `rank`: the next live rank that serves, or if none is left the next live rank.
  int successor(int rank, const std::vector<bool>& living) const {
    for (const bool any : {options.servers == 0, true})
      for (int k = 1; k < ranks; k++)
        if (const int r = (rank + k) % ranks; living[std::size_t(r)] && (any || r >= workers())) return r;
    return rank;
  }
};

// The factor of the learning rate for each 64 elements of the parameters. Frozen elements have 0.
inline std::vector<float> learning_rate_scales(const FlatParameters& flat) {
  std::vector<float> all(std::size_t(flat.numel() / FlatParameters::alignment));
  for (const ParameterRange& s : flat.parameter_ranges())
    for (std::int64_t i = s.local_begin; i < s.local_begin + s.length; i += FlatParameters::alignment)
      all[std::size_t(i / FlatParameters::alignment)] = s.frozen ? 0 : float(s.learning_rate_scale);
  return all;
}

}  // namespace tandem
