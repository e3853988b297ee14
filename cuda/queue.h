// Queues (streams) and events of a device, which implement core/queue.h, and pinned memory. They work in any thread.
#pragma once
#include <cuda_runtime.h>

#include <memory>

#include "core/queue.h"

namespace tandem::cuda {

class DeviceEvent : public Event {
 public:
  explicit DeviceEvent(int device);
  ~DeviceEvent() override { cudaEventDestroy(event_); }
  DeviceEvent(const DeviceEvent&) = delete;
  bool done() override;
  cudaEvent_t event() const { return event_; }

 private:
  int device_;
  cudaEvent_t event_ = nullptr;
};

class DeviceQueue : public Queue {
 public:
  DeviceQueue(int device, cudaStream_t stream) : device_(device), stream_(stream) {}
  void mark(Event& event) override;
  void fork(Event& event) override;
  void wait(Event& event) override;
  void fetch(void* pinned, const void* device, std::size_t bytes) override;
  void send(void* device, const void* pinned, std::size_t bytes) override;
  void* handle() override;
  std::unique_ptr<Follower> follower() override;

 private:
  int device_;
  cudaStream_t stream_;
};

// Makes a queue whose stream is destroyed with the object.
std::unique_ptr<Queue> new_queue(int device);
std::shared_ptr<void> pinned_memory(int device, std::size_t bytes);

}  // namespace tandem::cuda
