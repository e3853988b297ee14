#pragma once
#include "examples/course/course.h"

namespace tandem::course {

// d = g + wd·w;  v = μ·v + d;  w −= η·v, with Nesterov w −= η·(d + μ·v). std::fma(a, b, c) is a·b + c, rounded once,
// as the library computes it.
inline void momentum_step(Numbers& w, Numbers& v, const Numbers& g, const Momentum& o) {
  for (std::size_t i = 0; i < w.size(); i++) {
    const double d = std::fma(o.weight_decay, w[i], g[i]);
    v[i] = std::fma(o.momentum, v[i], d);
    w[i] = std::fma(-o.learning_rate, o.nesterov ? std::fma(o.momentum, v[i], d) : v[i], w[i]);
  }
}

inline double clip(Numbers& g, double limit) {
  double squares = 0;
  for (double v : g) squares += v * v;
  const double norm = std::sqrt(squares);
  if (norm <= limit) return norm;
  for (double& v : g) v *= limit / norm;
  return norm;
}

}  // namespace tandem::course
