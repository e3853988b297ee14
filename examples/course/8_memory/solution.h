#pragma once
#include "autograd/memory_choice.h"
#include "examples/course/course.h"

namespace tandem::course {

struct Cost {
  Fate fate;
  double seconds;
};
// A swap costs the time by which its two copies are longer than the time in which the tensor is not needed.
inline Cost cheapest(double free, double out, double in, double recompute) {
  const double swap = std::max(0.0, out + in - free);
  if (recompute >= 0 && recompute < swap) return {Fate::recompute, recompute};
  return {Fate::swap, swap};
}

// best[i][r]: the largest cost that is avoided by keeping some of the first i tensors in r bytes.
inline std::vector<bool> keep(const std::vector<std::size_t>& bytes, const Numbers& costs, std::size_t room) {
  const std::size_t n = bytes.size();
  std::vector<Numbers> best(n + 1, Numbers(room + 1));
  for (std::size_t i = 0; i < n; i++)
    for (std::size_t r = 0; r <= room; r++) {
      best[i + 1][r] = best[i][r];
      if (bytes[i] <= r) best[i + 1][r] = std::max(best[i][r], best[i][r - bytes[i]] + costs[i]);
    }
  std::vector<bool> kept(n);
  for (std::size_t i = n; i-- > 0;)
    if (best[i + 1][room] > best[i][room]) {
      kept[i] = true;
      room -= bytes[i];
    }
  return kept;
}

}  // namespace tandem::course
