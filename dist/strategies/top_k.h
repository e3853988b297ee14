// Top-k with error feedback (Aji and Heafield 2017, Stich et al. 2018). Of a range of gradients each rank sends only
// the k elements of largest magnitude. It keeps the rest, its residual, and adds that to its next gradient. So small
// elements are sent later, and nothing is lost. Every rank gathers the sent elements of all ranks and adds them in the
// order of ranks, so the results are the same on all ranks, bit for bit.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "dist/collectives/communicator.h"

namespace tandem {

// The form in which a bucket of gradients is exchanged.
class Compression {
 public:
  // length: the number of gradients whose unsent rest is kept for the next step; 0: no rest is kept.
  explicit Compression(std::int64_t length = 0) : residual_(std::size_t(length)), pending_(std::size_t(length)) {}
  virtual ~Compression() = default;
  // Starts the exchange of this rank's gradients. All ranks call it.
  virtual Work begin(Communicator& over, const float* gradients) = 0;
  // Call after the exchange. gradients: receives the sum over all ranks of what was sent.
  virtual void end(float* gradients) = 0;
  // Call after the step. What was not sent is kept for the next step. If the step was not made (a gradient was not
  // finite), this step's part is discarded and the earlier rest is kept.
  virtual void finish_step(bool made) {
    if (made) residual_.swap(pending_);
  }
  const std::vector<float>& residual() const { return residual_; }

 protected:
  void add_residual(const float* gradients) {
    for (std::size_t i = 0; i < pending_.size(); i++) pending_[i] = residual_[i] + gradients[i];
  }
  std::vector<float> residual_;  // the rest of the last step
  std::vector<float> pending_;   // of this step: what is to be sent, and after that the rest
};

class TopK : public Compression {
 public:
  // For `length` gradients. share: the fraction that is sent, above 0 and up to 1; at least one element is sent.
  TopK(double share, std::int64_t length) : Compression(length), order_(std::size_t(length)) {
    require(share > 0 && share <= 1, "top-k: the share that travels must be above 0 and up to 1, not ", share);
    chosen_.resize(std::size_t(std::clamp<std::int64_t>(std::int64_t(std::ceil(share * double(length))), 1, length)));
  }
  Work begin(Communicator& over, const float* gradients) override {
    add_residual(gradients);
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
  void end(float* gradients) override {
    std::fill_n(gradients, pending_.size(), 0.0f);
    const std::size_t count = chosen_.size();
    for (std::size_t at = 0; at < sent_.size(); at += 2 * count)
      for (std::size_t j = 0; j < count; j++)
        gradients[std::size_t(sent_[at + j])] += std::bit_cast<float>(sent_[at + count + j]);
  }

  std::int64_t k() const { return std::int64_t(chosen_.size()); }

 private:
  std::vector<std::int32_t> order_, chosen_, sent_;  // sent: for each rank k indices and, as bits, k values
};

}  // namespace tandem
