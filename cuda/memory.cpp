#include "cuda/memory.h"

#include <cstring>

#include "core/text.h"
#include "cuda/check.h"

namespace tandem::cuda {

DeviceMemory::DeviceMemory(const Device& device)
    : name_("the memory of GPU " + std::to_string(device.index) + ", " + device.name) {}

void* DeviceMemory::acquire(std::size_t bytes) {
  void* block = nullptr;
  const cudaError_t status = cudaMalloc(&block, bytes);
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // clears the error, which the next launch would report otherwise
    return nullptr;
  }
  CUDA_CHECK(status, "cudaMalloc of ", readable_bytes(double(bytes)));
  ours_ += bytes;
  return block;
}

void DeviceMemory::release(void* block, std::size_t bytes) {
  cudaFree(block);  // waits until the device is done with it
  ours_ -= bytes;
}

std::string memory_state(std::size_t free, std::size_t total, std::size_t ours) {
  const std::size_t others = total > free + ours ? total - free - ours : 0;
  return readable_bytes(double(total)) + ": " + readable_bytes(double(free)) + " free, " +
         readable_bytes(double(ours)) + " ours, " + readable_bytes(double(others)) +
         " held by other programs and by libraries";
}

std::string DeviceMemory::state() const {
  std::size_t free = 0, total = 0;
  if (cudaMemGetInfo(&free, &total) != cudaSuccess) return {};
  return memory_state(free, total, ours_);
}

std::size_t DeviceMemory::left() const {
  std::size_t free = 0, total = 0;
  return cudaMemGetInfo(&free, &total) == cudaSuccess ? free : std::size_t(-1);
}

Staging::Staging(cudaStream_t stream) : stream_(stream), gone_(slots) {
  CUDA_CHECK(cudaHostAlloc(reinterpret_cast<void**>(&pinned_), slots * slot_bytes, cudaHostAllocDefault));
  for (cudaEvent_t& e : gone_) CUDA_CHECK(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
}

Staging::~Staging() {
  for (cudaEvent_t e : gone_) cudaEventDestroy(e);
  cudaFreeHost(pinned_);
}

void Staging::send(void* device, const void* host, std::size_t bytes) {
  if (bytes == 0) return;
  if (bytes > slot_bytes) {
    CUDA_CHECK(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream_), "upload of ", bytes, " bytes");
    CUDA_CHECK(cudaStreamSynchronize(stream_), "upload of ", bytes, " bytes");
    return;
  }
  const int slot = next_;
  next_ = (next_ + 1) % slots;
  CUDA_CHECK(cudaEventSynchronize(gone_[std::size_t(slot)]));  // returns at once for an event that was never recorded
  std::byte* from = pinned_ + std::size_t(slot) * slot_bytes;
  std::memcpy(from, host, bytes);
  CUDA_CHECK(cudaMemcpyAsync(device, from, bytes, cudaMemcpyHostToDevice, stream_), "upload of ", bytes, " bytes");
  CUDA_CHECK(cudaEventRecord(gone_[std::size_t(slot)], stream_));
}

void Staging::fetch(void* host, const void* device, std::size_t bytes) {
  if (bytes == 0) return;
  CUDA_CHECK(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream_), "download of ", bytes, " bytes");
  CUDA_CHECK(cudaStreamSynchronize(stream_), "download of ", bytes, " bytes");
}

bool is_nan(DType type, const void* device, cudaStream_t stream) {
  auto read = [&]<class T>(T value) {
    CUDA_CHECK(cudaMemcpyAsync(&value, device, sizeof value, cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    return float(value);
  };
  const float value = type == DType::f32 ? read(0.f) : type == DType::bf16 ? read(bf16()) : read(f16());
  return value != value;
}

}  // namespace tandem::cuda
