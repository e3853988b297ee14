// Linked in builds without oneDNN: the reference backend, which is slower, replaces the cpu backend.
#include "core/backend.h"

namespace tandem {

std::unique_ptr<Backend> cpu_backend(int threads) { return reference_backend(threads); }

}  // namespace tandem
