#pragma once
#include "autograd/memory_choice.h"
#include "examples/course/course.h"

namespace tandem::course {

// The cost of a tensor that is not kept: Fate::swap or Fate::recompute, and the seconds it adds to the step.
struct Cost {
  Fate fate;
  double seconds;
};
// free: seconds from its last use to its first use in backward; out, in: of its copies; recompute: of computing it
// again, negative where that is impossible.
inline Cost cheapest(double free, double out, double in, double recompute) { not_written(); }

// Which tensors to keep: their bytes sum to at most `room`, and their costs, which keeping avoids, to the most.
inline std::vector<bool> keep(const std::vector<std::size_t>& bytes, const Numbers& costs, std::size_t room) {
  not_written();
}

}  // namespace tandem::course
