// Linked in builds without CUDA: a request for the GPU throws an error with the reason.
#include "core/backend.h"
#include "core/mover.h"

namespace tandem {

std::unique_ptr<Backend> cuda_backend(int) { fail("this build has no CUDA backend"); }
int cuda_devices() { return 0; }
std::unique_ptr<Mover> unified_mover(Backend&, std::size_t) { fail("this build has no CUDA backend"); }

}  // namespace tandem
