// Top-k with error feedback (Aji and Heafield 2017, Stich et al. 2018): of a range of gradients each rank sends only
// the k elements of largest magnitude, and keeps the rest, its residual, to be added to its next gradient: what is
// small travels later, and nothing is lost. Every rank gathers what all of them sent, and adds it up in the order of
// ranks, so that the results are the same on all ranks, bit for bit.
#pragma once
#include <cstdint>
#include <vector>

#include "dist/collectives/communicator.h"

namespace tandem {

class TopK {
 public:
  // Of `length` gradients, the share of them that travels: above 0 and up to 1; at least one does.
  TopK(double share, std::int64_t length);
  // The exchange of this rank's gradients. All ranks call it.
  Work begin(Communicator& over, const float* gradients);
  // When that is over: the sum of what all ranks sent.
  void end(float* gradients);
  // After the step. What did not travel waits for the next one; with a step that was not made (a gradient was not
  // finite), this step's part of it is forgotten, and what waited before it waits on.
  void finish_step(bool made);

  std::int64_t k() const { return std::int64_t(chosen_.size()); }
  const std::vector<float>& residual() const { return residual_; }

 private:
  std::vector<float> residual_, pending_;            // after the last step, and after this one
  std::vector<std::int32_t> order_, chosen_, sent_;  // sent: of each rank k indices and, as bits, k values
};

}  // namespace tandem
