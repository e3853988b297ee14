#pragma once
#include "examples/course/course.h"

namespace tandem::course {

// x: this rank's numbers, the same count on every rank; afterwards the sums over all ranks. ranks.send(to, buffer(…))
// and ranks.recv(from, buffer(…)) each start a transfer and return a Work, whose wait() returns when it is complete.
inline void ring_all_reduce(Communicator& ranks, std::span<double> x) { not_written(); }

}  // namespace tandem::course
