// Times of a stream for a trace: an event for each mark. The same spans are NVTX ranges for NVIDIA's profilers; they
// cost nothing when no profiler is attached.
#pragma once
#include <cuda_runtime.h>

#include <memory>

#include "core/trace/trace.h"

namespace tandem::cuda {

std::unique_ptr<Follower> follow(cudaStream_t stream);

// Times of marks from the milliseconds between one and the next, the first of them at `first`: a sum in double, since a
// float that counts from the first would have no microseconds left after some seconds.
std::vector<std::int64_t> times_of(std::int64_t first, const std::vector<float>& between);

}  // namespace tandem::cuda
