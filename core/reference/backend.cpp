#include "core/reference/backend.h"

#include <cstring>

#include "core/reference/kernels.h"

namespace tandem {
namespace reference {

ReferenceBackend::ReferenceBackend(int threads, std::unique_ptr<MemorySource> source)
    : Backend("reference", std::move(source), threads > 0 ? threads : default_threads()) {
  provide<float>(std::make_unique<ReferenceKernels<float>>(threads_, memory()));
  provide<bf16>(std::make_unique<ReferenceKernels<bf16>>(threads_, memory()));
  provide<double>(std::make_unique<ReferenceKernels<double>>(threads_, memory()));
}

std::string ReferenceBackend::description() const { return "reference loops, " + counted(threads(), "thread"); }

bool ReferenceBackend::supports(DType dtype) const {
  return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f64;
}

// An empty tensor may have a null pointer, which memcpy does not allow.
void ReferenceBackend::copy(void* to, const void* from, std::size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

}  // namespace reference

std::unique_ptr<Backend> reference_backend(int threads) {
  auto backend = std::make_unique<reference::ReferenceBackend>(threads);
  backend->deterministic(true);
  return backend;
}

}  // namespace tandem
