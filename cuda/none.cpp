// Linked where there is no CUDA: asking for the GPU fails, and says why.
#include "core/backend.h"
#include "core/mover.h"

namespace tandem {

std::unique_ptr<Backend> cuda_backend(int) { fail("this build has no CUDA backend"); }
int cuda_devices() { return 0; }
std::unique_ptr<Mover> unified_mover(Backend&, std::size_t) { fail("this build has no CUDA backend"); }

}  // namespace tandem
