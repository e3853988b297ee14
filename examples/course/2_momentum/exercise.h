#pragma once
#include "examples/course/course.h"

namespace tandem::course {

// One step of SGD on the flat vector: changes the weights w and the velocity v. g: the gradient.
inline void momentum_step(Numbers& w, Numbers& v, const Numbers& g, const Momentum& o) { not_written(); }

// Scales g so that its norm is at most `limit`. Returns the norm that it had.
inline double clip(Numbers& g, double limit) { not_written(); }

}  // namespace tandem::course
