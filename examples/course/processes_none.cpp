// Replaces processes.cpp in a build without a network library.
#include "examples/course/check.h"

namespace tandem::course {

std::unique_ptr<Communicator> process_ranks() { return nullptr; }

}  // namespace tandem::course
