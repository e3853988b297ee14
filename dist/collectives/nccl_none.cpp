// Linked if the build has no NCCL.
#include "dist/collectives/nccl.h"

namespace tandem {

int nccl_version() { return 0; }

std::unique_ptr<Communicator> over_nccl(std::shared_ptr<Communicator>, Backend&, const NcclOptions&) {
  fail("this build has no NCCL");
}

}  // namespace tandem
