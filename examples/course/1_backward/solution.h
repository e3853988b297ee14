#pragma once
#include "examples/course/course.h"

namespace tandem::course {

// y = log(1 + eˣ). dy/dx = 1/(1 + e⁻ˣ).
inline double softplus_backward(double x, double dy) { return dy / (1 + std::exp(-x)); }

// y = (x − μ)/√(v + eps) of one row. dx = (dy − mean(dy) − y·mean(dy·y))/√(v + eps).
inline Numbers layer_norm_backward(const Numbers& x, const Numbers& dy, double eps) {
  const double n = double(x.size());
  double mean = 0, variance = 0, mean_dy = 0, mean_dyy = 0;
  for (double v : x) mean += v / n;
  for (double v : x) variance += (v - mean) * (v - mean) / n;
  const double root = std::sqrt(variance + eps);
  for (std::size_t i = 0; i < x.size(); i++) {
    mean_dy += dy[i] / n;
    mean_dyy += dy[i] * (x[i] - mean) / root / n;
  }
  Numbers dx(x.size());
  for (std::size_t i = 0; i < x.size(); i++) dx[i] = (dy[i] - mean_dy - (x[i] - mean) / root * mean_dyy) / root;
  return dx;
}

}  // namespace tandem::course
