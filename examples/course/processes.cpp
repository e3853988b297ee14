#include "dist/job/job.h"
#include "examples/course/check.h"

namespace tandem::course {

std::unique_ptr<Communicator> process_ranks() {
  if (place_in().size == 1) return nullptr;
  return Job().communicator();
}

}  // namespace tandem::course
