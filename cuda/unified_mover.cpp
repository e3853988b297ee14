// Unified memory as a mover (core/mover.h). Swapped-out bytes are kept in managed blocks, which prefer the host and are
// mapped by the device. Copies to and from them therefore cross the bus and migrate no pages into the memory that the
// budget counts.
#include "core/machine.h"
#include "core/queue_mover.h"
#include "core/text.h"
#include "cuda/check.h"

namespace tandem {
namespace cuda {
namespace {

// CUDA 13 specifies a location by a structure, CUDA 12 by a device number.
#if CUDART_VERSION >= 13000
cudaMemLocation host() { return {cudaMemLocationTypeHost, 0}; }
cudaMemLocation on_device(int index) { return {cudaMemLocationTypeDevice, index}; }
cudaError_t prefetch(void* p, std::size_t bytes, cudaMemLocation to, cudaStream_t s) {
  return cudaMemPrefetchAsync(p, bytes, to, 0, s);
}
#else
int host() { return cudaCpuDeviceId; }
int on_device(int index) { return index; }
cudaError_t prefetch(void* p, std::size_t bytes, int to, cudaStream_t s) {
  return cudaMemPrefetchAsync(p, bytes, to, s);
}
#endif

// Allocates pages on the host by a prefetch on a separate stream, because the copies' streams may be part of a
// recording.
std::shared_ptr<void> managed_block(Queue& places, int device, std::size_t bytes) {
  auto* stream = static_cast<cudaStream_t>(places.handle());
  void* p = nullptr;
  CUDA_CHECK(cudaMallocManaged(&p, bytes, cudaMemAttachGlobal), readable_bytes(double(bytes)), " of managed memory");
  std::shared_ptr<void> block(p, [](void* q) { cudaFree(q); });
  CUDA_CHECK(cudaMemAdvise(p, bytes, cudaMemAdviseSetPreferredLocation, host()));
  CUDA_CHECK(cudaMemAdvise(p, bytes, cudaMemAdviseSetAccessedBy, on_device(device)));
  CUDA_CHECK(prefetch(p, bytes, host(), stream), readable_bytes(double(bytes)), " of managed memory");
  CUDA_CHECK(cudaStreamSynchronize(stream));
  return block;
}

void copy(Queue& queue, void* to, const void* from, std::size_t bytes) {
  CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(queue.handle())));
}

}  // namespace
}  // namespace cuda

std::unique_ptr<Mover> unified_mover(Backend& backend, std::size_t budget) {
  backend.queue().handle();  // sets the device of this thread
  int device = 0, concurrent = 0;
  CUDA_CHECK(cudaGetDevice(&device));
  CUDA_CHECK(cudaDeviceGetAttribute(&concurrent, cudaDevAttrConcurrentManagedAccess, device));
  if (!concurrent)
    refuse("unified memory: GPU ", device,
           " does not share managed memory with the host while it computes: swap to pinned memory");
  std::size_t free = 0, total = 0;
  CUDA_CHECK(cudaMemGetInfo(&free, &total));
  const std::size_t ours = backend.memory().statistics().reserved_bytes, all = free + ours,
                    taken = std::max(budget, ours);
  if (all <= taken)
    refuse("unified memory: beside ", readable_bytes(double(taken)), " for the run nothing of GPU ", device, "'s ",
           readable_bytes(double(total)),
           " is left, and managed memory beyond what is free can hang it: swap to pinned memory, or choose a "
           "smaller --memory-budget");
  const auto take = [places = std::shared_ptr<Queue>(backend.new_queue()), device](std::size_t bytes) {
    return cuda::managed_block(*places, device, bytes);
  };
  return queue_mover(backend,
                     {"unified memory", std::min(all - taken, available_memory() / 2), take, cuda::copy, cuda::copy});
}

}  // namespace tandem
