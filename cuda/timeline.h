// Times of a stream for a trace, with an event for each mark. The same spans are NVTX ranges for NVIDIA's profilers;
// these cost nothing when no profiler is attached.
#pragma once
#include <cuda_runtime.h>

#include <memory>

#include "core/trace/trace.h"

namespace tandem::cuda {

std::unique_ptr<Follower> follow(cudaStream_t stream);

// The times of marks, from the milliseconds between successive marks; the first mark is at `first`. They are summed in
// double, since a float that counts from the first mark would not resolve microseconds after some seconds.
std::vector<std::int64_t> times_of(std::int64_t first, const std::vector<float>& between);

}  // namespace tandem::cuda
