#pragma once
#include "examples/course/course.h"

namespace tandem::course {

inline void asgd(std::span<double> w, std::span<const double> g, double rate) {
  for (std::size_t i = 0; i < w.size(); i++) w[i] -= rate * g[i];
}
// The gradient at w, to the first order: g + λ·g²·(w − sent).
inline void delay_compensated(std::span<double> w, std::span<const double> g, std::span<const double> sent, double rate,
                              double lambda) {
  for (std::size_t i = 0; i < w.size(); i++) w[i] -= rate * (g[i] + lambda * g[i] * g[i] * (w[i] - sent[i]));
}

// SA-ASGD: a later gradient makes a smaller step.
inline void own_rule(std::span<double> w, std::span<const double> g, std::span<const double>, double rate,
                     double delay) {
  asgd(w, g, rate / std::max(1.0, delay));
}

class Shard {
 public:
  Shard(const Numbers& w, int workers) : w_(w), sent_(std::size_t(workers), w) {}
  Numbers pull(int worker) { return sent_[std::size_t(worker)] = w_; }
  void push(int worker, const Numbers& g, double rate, double lambda) {
    delay_compensated(w_, g, sent_[std::size_t(worker)], rate, lambda);
  }

 private:
  Numbers w_;
  std::vector<Numbers> sent_;
};

}  // namespace tandem::course
