// The source of device memory, and pinned host memory for transfers to the device.
#pragma once
#include <cuda_runtime.h>

#include <cstddef>
#include <vector>

#include "core/dtype.h"
#include "core/memory.h"
#include "cuda/device.h"

namespace tandem::cuda {

class DeviceMemory : public MemorySource {
 public:
  explicit DeviceMemory(const Device& device);
  void* acquire(std::size_t bytes) override;
  void release(void* block, std::size_t bytes) override;
  const char* name() const override { return name_.c_str(); }
  // "79.1 GiB: 0.4 GiB free, 70 GiB ours, 8.7 GiB held by other programs and by libraries"
  std::string state() const override;
  std::size_t left() const override;

 private:
  std::string name_;
  std::size_t ours_ = 0;
};
// The text of state(), from numbers.
std::string memory_state(std::size_t free, std::size_t total, std::size_t ours);

// Whether the first element of f32, bf16 or f16 numbers on the device is NaN. Waits for the stream.
bool is_nan(DType type, const void* device, cudaStream_t stream);

// Sends small pieces of host memory to the device without waiting. They are copied to one of several pinned slots, from
// which the device copies them in queue order. When all slots are in use, send() waits for the oldest one. Larger
// pieces are copied directly, and send() waits.
class Staging {
 public:
  static constexpr std::size_t slot_bytes = 4096;
  static constexpr int slots = 32;
  explicit Staging(cudaStream_t stream);
  ~Staging();
  Staging(const Staging&) = delete;
  void send(void* device, const void* host, std::size_t bytes);
  void fetch(void* host, const void* device, std::size_t bytes);  // waits for the stream

 private:
  cudaStream_t stream_;
  std::byte* pinned_ = nullptr;
  std::vector<cudaEvent_t> gone_;  // per slot: marks the end of its last copy
  int next_ = 0;
};

}  // namespace tandem::cuda
