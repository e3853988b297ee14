#pragma once
#include "examples/course/course.h"

namespace tandem::course {

// y = log(1 + eˣ). Returns dL/dx from dy = dL/dy.
inline double softplus_backward(double x, double dy) { not_written(); }

// y = (x − μ)/√(v + eps) of one row of n numbers, with its mean μ and its variance v = Σ(x − μ)²/n. Returns dL/dx.
inline Numbers layer_norm_backward(const Numbers& x, const Numbers& dy, double eps) { not_written(); }

}  // namespace tandem::course
