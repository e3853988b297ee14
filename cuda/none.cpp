// Linked where there is no CUDA: asking for the GPU fails, and says why.
#include "core/backend.h"

namespace tandem {

std::unique_ptr<Backend> cuda_backend(int) { fail("this build has no CUDA backend"); }
int cuda_devices() { return 0; }

}  // namespace tandem
