#include "dist/job/job.h"
#include "examples/course/check.h"

namespace tandem::course {

std::unique_ptr<Communicator> process_ranks() { return place_in().size == 1 ? nullptr : Job().communicator(); }

}  // namespace tandem::course
