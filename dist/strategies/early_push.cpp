#include "dist/strategies/early_push.h"

#include <algorithm>
#include <utility>

#include "core/backend.h"
#include "dist/strategies/gradient_buckets.h"

namespace tandem {

EarlyPush::EarlyPush(FlatParameters& flat, Optimizer& optimizer, ServerNode& node, bool allowed)
    : flat_(flat), optimizer_(optimizer), node_(node) {
  if (!allowed || flat.backend().on_device() || flat.backend().asynchronous()) return;
  const std::int64_t bytes = std::clamp<std::int64_t>(std::int64_t(flat.gradients.bytes()) / 64, 64 << 10, 1 << 20);
  final_.emplace(flat, cut(flat.numel(), flat.gradients.dtype(), bytes));
}

void EarlyPush::step_begins(bool sends) {
  sends_ = sends && final_ && !optimizer_.needs_whole_gradient() && node_.pushes_parts();
}

void EarlyPush::ready(const ParameterRange& parameter) {
  if (!sends_) return;
  for (std::size_t r : final_->ready(parameter)) part_is_final((*final_)[r]);
}

void EarlyPush::part_is_final(Range part) {
  optimizer_.measure(part, std::exchange(measured_, true));
  optimizer_.finish_gradients(part);
  node_.push_part(buffer(flat_.gradients), part);
}

bool EarlyPush::finish(const Tensor& loss) {
  if (!sends_) optimizer_.measure(flat_.all(), false);
  for (std::size_t r = 0; sends_ && r < final_->size(); r++)
    if (!final_->complete(r) || final_->empty(r)) part_is_final((*final_)[r]);
  if (final_) final_->restart();
  optimizer_.check_gradients(&loss);
  const bool finite = optimizer_.read_state().not_finite == 0;
  if (finite && !sends_) optimizer_.finish_gradients(flat_.all());
  sends_ = measured_ = false;  // a backward that searches for non-finite values sends nothing
  return finite;
}

}  // namespace tandem
