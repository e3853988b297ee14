#pragma once
#include "autograd/memory_choice.h"
#include "examples/course/course.h"

namespace tandem::course {

// The cost of a tensor that is not kept: Fate::swap or Fate::recompute, and the seconds it adds to the step.
struct Cost {
  Fate fate;
  double seconds;
};
// free: seconds from the tensor's last use in forward to its first use in backward. out, in: seconds of its copies.
// recompute: seconds to compute it again; negative: impossible.
inline Cost cheapest(double free, double out, double in, double recompute) { not_written(); }

// Chooses the tensors to keep: the sum of their bytes is at most `room`, the sum of their costs the largest possible.
inline std::vector<bool> keep(const std::vector<std::size_t>& bytes, const Numbers& costs, std::size_t room) {
  not_written();
}

}  // namespace tandem::course
