#pragma once
#include "examples/course/course.h"

namespace tandem::course {

// x: this rank's numbers, as many on every rank; afterwards their sums over all ranks.
// ranks.send(to, buffer(…)) and ranks.recv(from, buffer(…)) each start a transfer and return a Work; wait() ends it.
inline void ring_all_reduce(Communicator& ranks, std::span<double> x) { not_written(); }

}  // namespace tandem::course
