// Memory movement and description of the reference backend; its operations have a file per family beside this one.
#include "core/reference/backend.h"

#include <algorithm>
#include <cstring>

namespace tandem::reference {

ReferenceBackend::ReferenceBackend(int threads, std::unique_ptr<MemorySource> source)
    : Backend("reference", std::move(source), threads > 0 ? threads : default_threads()) {}

std::string ReferenceBackend::description() const {
  return "reference loops, " + std::to_string(threads()) + (threads() == 1 ? " thread" : " threads");
}

bool ReferenceBackend::supports(DType dtype) const {
  return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f64;
}

// An empty tensor may have a null pointer, which memcpy must not be given.
void ReferenceBackend::upload(void* device, const void* host, std::size_t bytes) { copy(device, host, bytes); }
void ReferenceBackend::download(void* host, const void* device, std::size_t bytes) { copy(host, device, bytes); }
void ReferenceBackend::copy(void* to, const void* from, std::size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

}  // namespace tandem::reference

namespace tandem {
std::unique_ptr<Backend> reference_backend(int threads) {
  auto backend = std::make_unique<reference::ReferenceBackend>(threads);
  backend->deterministic(true);
  return backend;
}
}  // namespace tandem
