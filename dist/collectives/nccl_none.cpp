// Linked if nccl.h is missing at build time.
#include "dist/collectives/nccl.h"

namespace tandem {

const NcclLibrary& installed_nccl() {
  static const NcclLibrary none{.why_not = "this build has no NCCL"};
  return none;
}

std::unique_ptr<Communicator> over_nccl(const NcclLibrary& nccl, std::shared_ptr<Communicator>, Backend&,
                                        const NcclOptions&) {
  fail("NCCL cannot be used: ", nccl.why_not);
}

}  // namespace tandem
