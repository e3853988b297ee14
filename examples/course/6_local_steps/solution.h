#pragma once
#include "examples/course/course.h"

namespace tandem::course {

inline void local_sgd(Communicator& ranks, std::span<double> w, int steps, int H, const std::function<void()>& step) {
  for (int s = 1; s <= steps; s++) {
    step();
    if (s % H != 0 && s != steps) continue;
    ranks.all_reduce(buffer(w)).wait();
    for (double& v : w) v /= ranks.size();
  }
}

// A sum begins every B batches and with the last one; it is merged W batches later, or with the last one.
inline Turn turn_after(int batch, int last, int B, int W) {
  Turn turn;
  turn.sends = batch == last || B == 0 || batch % B == 0;
  turn.blocks = batch == last || B == 0 || (turn.sends && W == 0);
  if (B == 0 || W == 0 || batch == 0) return turn;
  const int sent = (batch - 1) / B * B;
  turn.merges = batch - sent == std::min(W, last - sent);
  return turn;
}

// x = (2W·x + Σ x_i) / (2W + P), with 1 in place of 2W when W = 0.
inline void daso_merge(std::span<double> x, std::span<const double> sum, double waited, double hosts) {
  const double weight = waited > 0 ? 2 * waited : 1;
  for (std::size_t i = 0; i < x.size(); i++) x[i] = (weight * x[i] + sum[i]) / (weight + hosts);
}

}  // namespace tandem::course
