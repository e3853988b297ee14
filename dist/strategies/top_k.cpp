#include "dist/strategies/top_k.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

namespace tandem {

TopK::TopK(double share, std::int64_t length)
    : residual_(std::size_t(length)), pending_(std::size_t(length)), order_(std::size_t(length)) {
  require(share > 0 && share <= 1, "top-k: the share that travels must be above 0 and up to 1, not ", share);
  chosen_.resize(std::size_t(std::clamp<std::int64_t>(std::int64_t(std::ceil(share * double(length))), 1, length)));
}

Work TopK::begin(Communicator& over, const float* gradients) {
  for (std::size_t i = 0; i < pending_.size(); i++) pending_[i] = residual_[i] + gradients[i];
  // The bits of magnitudes have the same order as the magnitudes, with NaN above all. So non-finite values are chosen
  // first, and are detected.
  auto larger = [&](std::int32_t a, std::int32_t b) {
    const auto x = std::bit_cast<std::uint32_t>(pending_[std::size_t(a)]) & 0x7fffffffu;
    const auto y = std::bit_cast<std::uint32_t>(pending_[std::size_t(b)]) & 0x7fffffffu;
    return x != y ? x > y : a < b;
  };
  std::iota(order_.begin(), order_.end(), 0);
  const std::size_t count = chosen_.size();
  if (count < order_.size()) std::nth_element(order_.begin(), order_.begin() + k(), order_.end(), larger);
  std::copy_n(order_.begin(), count, chosen_.begin());
  std::sort(chosen_.begin(), chosen_.end());
  sent_.resize(std::size_t(over.size()) * 2 * count);
  std::int32_t* mine = sent_.data() + std::size_t(over.rank()) * 2 * count;
  for (std::size_t j = 0; j < count; j++) {
    float& value = pending_[std::size_t(chosen_[j])];
    mine[j] = chosen_[j];
    mine[count + j] = std::bit_cast<std::int32_t>(value);
    value = 0;
  }
  return over.all_gather(buffer(sent_));
}

void TopK::end(float* gradients) {
  std::fill_n(gradients, pending_.size(), 0.0f);
  const std::size_t count = chosen_.size();
  for (std::size_t at = 0; at < sent_.size(); at += 2 * count)
    for (std::size_t j = 0; j < count; j++)
      gradients[std::size_t(sent_[at + j])] += std::bit_cast<float>(sent_[at + count + j]);
}

void TopK::finish_step(bool made) {
  if (made) residual_.swap(pending_);
}

}  // namespace tandem
