// Top-k with error feedback (Aji and Heafield 2017, Stich et al. 2018). Of a range of gradients each rank sends only
// the k elements of largest magnitude. It keeps the rest, its residual, and adds that to its next gradient. So small
// elements are sent later, and nothing is lost. Every rank gathers the sent elements of all ranks and adds them in the
// order of ranks, so the results are the same on all ranks, bit for bit.
#pragma once
#include <cstdint>
#include <vector>

#include "dist/collectives/communicator.h"

namespace tandem {

// The form in which a bucket of gradients is exchanged.
class Compression {
 public:
  virtual ~Compression() = default;
  // Starts the exchange of this rank's gradients. All ranks call it.
  virtual Work begin(Communicator& over, const float* gradients) = 0;
  // Call after the exchange. gradients: receives the sum over all ranks of what was sent.
  virtual void end(float* gradients) = 0;
  // Call after the step. What was not sent is kept for the next step. If the step was not made (a gradient was not
  // finite), this step's part is discarded and the earlier rest is kept.
  virtual void finish_step(bool made) { (void)made; }
};

class TopK : public Compression {
 public:
  // For `length` gradients. share: the fraction that is sent, above 0 and up to 1; at least one element is sent.
  TopK(double share, std::int64_t length);
  Work begin(Communicator& over, const float* gradients) override;
  void end(float* gradients) override;
  void finish_step(bool made) override;

  std::int64_t k() const { return std::int64_t(chosen_.size()); }
  const std::vector<float>& residual() const { return residual_; }

 private:
  std::vector<float> residual_, pending_;            // after the last step, and after this one
  std::vector<std::int32_t> order_, chosen_, sent_;  // sent: for each rank k indices and, as bits, k values
};

}  // namespace tandem
