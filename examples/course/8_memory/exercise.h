#pragma once
#include "autograd/memory_choice.h"
#include "examples/course/course.h"

namespace tandem::course {

// A tensor that is saved for backward and is not kept: Fate::swap or Fate::recompute, and the seconds that the step
// takes longer for it. free: from its last use to its first use in backward; out, in: of its copies; recompute: of
// computing it again, negative where that is impossible.
struct Cost {
  Fate fate;
  double seconds;
};
inline Cost cheapest(double free, double out, double in, double recompute) { not_written(); }

// Which tensors to keep: their bytes sum to at most `room`, and their costs to the most (a 0–1 knapsack). Where two
// choices cost the same, either will do.
inline std::vector<bool> keep(const std::vector<std::size_t>& bytes, const Numbers& costs, std::size_t room) {
  not_written();
}

}  // namespace tandem::course
