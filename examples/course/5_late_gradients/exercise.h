#pragma once
#include "examples/course/course.h"

namespace tandem::course {

// A gradient g, computed at the weights `sent`, arrives when the shard's weights are w.
inline void asgd(std::span<double> w, std::span<const double> g, double rate) { not_written(); }
inline void delay_compensated(std::span<double> w, std::span<const double> g, std::span<const double> sent, double rate,
                              double lambda) {
  not_written();
}

// A rule of your own. delay: the number of other gradients that were applied since `sent`.
inline void own_rule(std::span<double> w, std::span<const double> g, std::span<const double> sent, double rate,
                     double delay) {
  not_written();
}

// A shard of the server: it holds weights, and for each worker the weights that it last sent to it.
class Shard {
 public:
  Shard(const Numbers& w, int workers) {}
  Numbers pull(int worker) { not_written(); }
  // Applies this worker's gradient with delay_compensated().
  void push(int worker, const Numbers& g, double rate, double lambda) { not_written(); }
};

}  // namespace tandem::course
