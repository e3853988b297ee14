// Unified memory as a mover (core/mover.h): the copies outside are managed blocks that prefer the host and that the
// device maps, so that copies to and from them cross the bus and do not migrate pages into the memory that the budget
// counts.
#include "core/machine.h"
#include "core/queue_mover.h"
#include "core/text.h"
#include "cuda/check.h"

namespace tandem {
namespace cuda {
namespace {

// CUDA 13 names a place by a structure, 12 by a device's number.
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

class UnifiedMover final : public QueueMover {
 public:
  UnifiedMover(Backend& backend, std::size_t most) : QueueMover(backend, most), places_(backend.new_queue()) {
    CUDA_CHECK(cudaGetDevice(&device_));
  }
  std::string description() const override { return "unified memory"; }

 private:
  // Pages are made on the host, by a prefetch on a stream of its own: the copies' streams may be part of a recording.
  std::shared_ptr<void> take(std::size_t bytes) override {
    auto* stream = static_cast<cudaStream_t>(places_->handle());
    void* p = nullptr;
    CUDA_CHECK(cudaMallocManaged(&p, bytes, cudaMemAttachGlobal), readable_bytes(double(bytes)), " of managed memory");
    std::shared_ptr<void> block(p, [](void* q) { cudaFree(q); });
    CUDA_CHECK(cudaMemAdvise(p, bytes, cudaMemAdviseSetPreferredLocation, host()));
    CUDA_CHECK(cudaMemAdvise(p, bytes, cudaMemAdviseSetAccessedBy, on_device(device_)));
    CUDA_CHECK(prefetch(p, bytes, host(), stream), readable_bytes(double(bytes)), " of managed memory");
    CUDA_CHECK(cudaStreamSynchronize(stream));
    return block;
  }
  void send_out(Queue& queue, void* room, const void* from, std::size_t bytes) override {
    copy(queue, room, from, bytes);
  }
  void send_in(Queue& queue, void* to, const void* room, std::size_t bytes) override { copy(queue, to, room, bytes); }
  static void copy(Queue& queue, void* to, const void* from, std::size_t bytes) {
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(queue.handle())));
  }

  std::unique_ptr<Queue> places_;
  int device_ = 0;
};

}  // namespace
}  // namespace cuda

std::unique_ptr<Mover> unified_mover(Backend& backend, std::size_t budget) {
  backend.queue().handle();  // makes the device this thread's
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
  return std::make_unique<cuda::UnifiedMover>(backend, std::min(all - taken, available_memory() / 2));
}

}  // namespace tandem
