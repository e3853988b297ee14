// Tandem's own kernels (norm.h, pool.h, rows.h, elements.h, plain_convolution.h) are templates in headers, which nvcc
// compiles in backend.cu and convolution.cu. Host functions start them. T is float, bf16 or f16 (activations);
// parameters, statistics and losses are float. Pointers are to device memory. All functions queue work on the stream
// and do not wait. Arithmetic is float; sums are finished in double, in a fixed order, so every run gives the same
// bits.
#pragma once
#include <cuda_runtime.h>

#include "core/backend.h"

namespace tandem::cuda {

struct Grid {  // the number of processors, and the stream on which work is queued
  cudaStream_t stream = nullptr;
  int processors = 1;
};

inline constexpr int most_parts = 1024;  // maximum number of partial sums per channel
// Floats of scratch memory that `sums` simultaneous sums over the rows of `channels` columns need (columns.h).
inline std::size_t column_scratch(int sums, std::int64_t channels) {
  return std::size_t(most_parts) * std::size_t(sums) * std::size_t(channels);
}

}  // namespace tandem::cuda
