#include "layers/loading.h"

namespace tandem {
namespace {

LoaderOptions shuffled_and_augmented(const Pictures& pictures, const Options& o) {
  Augment augment = o.augment ? Augment::usual(int(pictures.height())) : Augment{};
  augment.cutout = o.cutout;
  return {.batch = o.batch,
          .global_batch = o.global_batch,
          .dtype = o.dtype,
          .augment = augment,
          .mixup = o.mixup,
          .drop_last = pictures.count() >= (o.global_batch ? o.global_batch : o.batch),
          .seed = o.seed};
}

LoaderOptions in_order(const Options& o) { return {.batch = 500, .dtype = o.dtype, .shuffle = false}; }

}  // namespace

Loaders::Loaders(const Dataset& data, const Options& o, Backend& backend)
    : Loaders(split(data.train, o.val, o.seed), data.test, o, backend) {}

Loaders::Loaders(const std::pair<Pictures, Pictures>& parts, const Pictures& tested, const Options& o, Backend& backend)
    : train(parts.first, shuffled_and_augmented(parts.first, o), backend), test(tested, in_order(o), backend) {
  if (o.val) validation.emplace(parts.second, in_order(o), backend);
}

}  // namespace tandem
