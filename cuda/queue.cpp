#include "cuda/queue.h"

#include "core/memory.h"
#include "core/text.h"
#include "cuda/check.h"
#include "cuda/timeline.h"

namespace tandem::cuda {

DeviceEvent::DeviceEvent(int device) : device_(device) {
  CUDA_CHECK(cudaSetDevice(device_));  // a new thread uses device 0 and would initialise it
  CUDA_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
}

bool DeviceEvent::done() {
  CUDA_CHECK(cudaSetDevice(device_));
  const cudaError_t status = cudaEventQuery(event_);
  if (status == cudaErrorNotReady) return false;
  CUDA_CHECK(status, "GPU ", device_);
  return true;
}

void* DeviceQueue::handle() {
  CUDA_CHECK(cudaSetDevice(device_));
  return stream_;
}

// In a recorded step the event is a node of the graph, which records it again at each launch; a plain event would
// become an edge of the graph.
void DeviceQueue::mark(Event& event) {
  handle();
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  CUDA_CHECK(cudaStreamIsCapturing(stream_, &capture));
  CUDA_CHECK(cudaEventRecordWithFlags(
      dynamic_cast<DeviceEvent&>(event).event(), stream_,
      capture == cudaStreamCaptureStatusActive ? cudaEventRecordExternal : cudaEventRecordDefault));
}

void DeviceQueue::fork(Event& event) {
  handle();
  CUDA_CHECK(cudaEventRecord(dynamic_cast<DeviceEvent&>(event).event(), stream_));
}

void DeviceQueue::wait(Event& event) {
  handle();
  CUDA_CHECK(cudaStreamWaitEvent(stream_, dynamic_cast<DeviceEvent&>(event).event()));
}

void DeviceQueue::fetch(void* pinned, const void* device, std::size_t bytes) {
  handle();
  if (bytes) CUDA_CHECK(cudaMemcpyAsync(pinned, device, bytes, cudaMemcpyDeviceToHost, stream_));
}

void DeviceQueue::send(void* device, const void* pinned, std::size_t bytes) {
  handle();
  if (bytes) CUDA_CHECK(cudaMemcpyAsync(device, pinned, bytes, cudaMemcpyHostToDevice, stream_));
}

std::unique_ptr<Follower> DeviceQueue::follower() { return follow(stream_); }

std::unique_ptr<Queue> new_queue(int device) {
  struct Own : DeviceQueue {
    explicit Own(int d, cudaStream_t s) : DeviceQueue(d, s), stream(s) {}
    ~Own() override { cudaStreamDestroy(stream); }
    cudaStream_t stream;
  };
  CUDA_CHECK(cudaSetDevice(device));
  cudaStream_t stream = nullptr;
  CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return std::make_unique<Own>(device, stream);
}

std::shared_ptr<void> pinned_memory(int device, std::size_t bytes) {
  CUDA_CHECK(cudaSetDevice(device));
  void* p = nullptr;
  CUDA_CHECK(cudaHostAlloc(&p, bytes, cudaHostAllocPortable), readable_bytes(double(bytes)), " of pinned memory");
  return {p, [](void* q) { cudaFreeHost(q); }};
}

}  // namespace tandem::cuda
