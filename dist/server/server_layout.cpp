#include "dist/server/server_layout.h"

#include <algorithm>

#include "dist/server/rules.h"

namespace tandem {
std::vector<std::int64_t> shard_cuts(std::int64_t numel, int servers) {
  const std::int64_t blocks = (numel + FlatParameters::cut - 1) / FlatParameters::cut;
  std::vector<std::int64_t> cuts;
  for (int s = 0; s <= servers; s++) cuts.push_back(std::min(numel, blocks * s / servers * FlatParameters::cut));
  return cuts;
}

ServerLayout::ServerLayout(ServerOptions o, int all, DType type, std::int64_t parameter_count,
                           std::int64_t buffer_count)
    : options(std::move(o)),
      ranks(all),
      dtype(type),
      parameters(parameter_count),
      buffers((buffer_count + FlatParameters::alignment - 1) / FlatParameters::alignment * FlatParameters::alignment) {
  check_servers(options.servers, ranks);
  const int owners = options.servers ? options.servers : ranks;
  cuts = shard_cuts(parameters, owners);
  for (int s = 0; s < owners; s++) owner.push_back(ranks - owners + s);
  if (!buffers) return;
  cuts.push_back(parameters + buffers);
  owner.push_back(0);
}

std::size_t ServerLayout::snapshot_bytes() const {
  if (options.snapshots <= 0 || ranks == 1) return 0;
  const Rule::Keeps keeps = make_rule(options.how.rule)->keeps();
  const std::int64_t vectors = keeps.velocity + (keeps.square_avg + keeps.own) * std::int64_t(workers());
  std::int64_t longest = 0;
  for (int s = 0; s < shards(); s++)
    if (of_parameters(s)) longest = std::max(longest, length(s));
  return bytes(vectors * longest);
}

int ServerLayout::successor(int rank, const std::vector<bool>& living) const {
  for (const bool any : {options.servers == 0, true})
    for (int k = 1; k < ranks; k++)
      if (const int r = (rank + k) % ranks; living[std::size_t(r)] && (any || r >= workers())) return r;
  return rank;
}

std::vector<RuleBlock> rule_blocks(const FlatParameters& flat, bool scaled) {
  std::vector<RuleBlock> all(std::size_t(flat.numel() / FlatParameters::alignment));
  std::int32_t tensor = 0;
  for (const ParameterRange& s : flat.parameter_ranges()) {
    const float scale = !scaled ? 1 : s.frozen ? 0 : float(s.learning_rate_scale);
    for (std::int64_t i = s.local_begin; i < s.local_begin + s.length; i += FlatParameters::alignment)
      all[std::size_t(i / FlatParameters::alignment)] = {scale, tensor};
    tensor++;
  }
  return all;
}

}  // namespace tandem
