// Shared by the files of the exercises.
#pragma once
#include <algorithm>
#include <cmath>
#include <functional>
#include <span>
#include <vector>

#include "dist/collectives/communicator.h"

namespace tandem::course {

using Numbers = std::vector<double>;

struct NotWritten {
  const char* function;
};
// The body of a function that the student has to write.
[[noreturn]] inline void not_written(const char* function = __builtin_FUNCTION()) { throw NotWritten{function}; }

// ---- exercise 2 -----------------------------------------------------------------------------------------------------
struct Momentum {
  double learning_rate, momentum, weight_decay;
  bool nesterov;
};

// ---- exercise 6 -----------------------------------------------------------------------------------------------------
struct Turn {
  bool sends = false;   // a sum of weights over hosts begins
  bool blocks = false;  // it is waited for at once
  bool merges = false;  // a sum that began earlier is merged
};

// ---- exercise 7 -----------------------------------------------------------------------------------------------------
// A softmax whose classes are cut over ranks: this rank has n of them, from class `begin` on.
struct SoftmaxRows {
  Numbers p;        // [B, n]: the probability of each of this rank's classes
  Numbers largest;  // [B]: the largest logit of each row, over all classes
  Numbers total;    // [B]: log Σ e^z over all classes
  Numbers own;      // [B]: the logit of each row's label
};
// The gradients of z = x·wᵀ with x [B, F], the same on every rank, and w [n, F], this rank's rows.
struct CutGradients {
  Numbers dx;  // [B, F], of all classes
  Numbers dw;  // [n, F]
};

}  // namespace tandem::course
