#include "layers/train/data_loading.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <tuple>

namespace tandem {
namespace {

// If the default batch is larger than the data set, uses half of the data set, rounded down to a power of two.
std::int64_t batch_of(const Pictures& pictures, const RunConfig& o) {
  const std::int64_t n = pictures.count();
  if (o.evaluate) return std::min<std::int64_t>(o.batch, n);  // it is not trained on
  if (n >= o.batch || o.batch_per_rank > 0 || o.given.contains("--batch")) return o.batch;
  const auto fits = std::int64_t(std::bit_floor(std::uint64_t(std::max<std::int64_t>(2, n) / 2)));
  std::printf("%ld training pictures do not fill a batch of %d: --batch %ld instead\n", n, o.batch, fits);
  return fits;
}

LoaderOptions shuffled_and_augmented(const Pictures& pictures, const RunConfig& o) {
  Augment augment = o.augment ? Augment::usual(int(pictures.height())) : Augment{};
  augment.reflect = o.reflect;
  augment.cutout = o.cutout;
  return {.batch = batch_of(pictures, o),
          .batch_per_rank = o.evaluate ? 0 : o.batch_per_rank,
          .dtype = o.dtype,
          .augment = augment,
          .mixup = o.mixup,
          .drop_last = true,
          .seed = o.seed,
          .partition = Partition::parse(o.partition)};
}

// --mean and --std in place of the data set's own.
Pictures normalised(Pictures p, const RunConfig& o) {
  const auto channels = std::size_t(p.channels());
  for (auto [option, given, target] : {std::tuple{"--mean", &o.mean, &p.mean}, {"--std", &o.std, &p.std}}) {
    if (given->empty()) continue;
    if (given->size() != 1 && given->size() != channels)
      refuse(option, ": ", given->size(), " numbers, but ", p.name, " has ",
             counted(std::int64_t(channels), "channel"));
    *target = given->size() == channels ? *given : std::vector<float>(channels, given->front());
  }
  return p;
}

// Evaluation saves nothing for backward. With a memory budget its batch is still no larger than a rank's batch in
// training, and no batch is prefetched.
LoaderOptions in_order(const RunConfig& o) {
  if (o.memory_budget == 0) return {.batch_per_rank = 500, .dtype = o.dtype, .shuffle = false};
  const int of_a_rank = o.batch_per_rank > 0 ? o.batch_per_rank : std::max(1, o.batch / local_size_from_environment());
  return {.batch_per_rank = std::min(500, of_a_rank), .dtype = o.dtype, .shuffle = false, .prefetch = 0};
}

}  // namespace

Loaders::Loaders(const Dataset& data, const RunConfig& o, Backend& backend)
    : parts(split(normalised(data.train, o), o.val, o.seed)),
      train(parts.first, shuffled_and_augmented(parts.first, o), backend),
      test(normalised(data.test, o), in_order(o), backend) {
  if (o.val) validation.emplace(parts.second, in_order(o), backend);
}

}  // namespace tandem
