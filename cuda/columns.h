// N sums at once over the rows of [rows, channels], for the statistics and the gradient of batch norm and the gradient
// of a bias. Each thread keeps neighbouring channels and iterates over rows. Blocks write partial sums, which a second
// kernel adds in double in a fixed order, without atomics, so that every run gives the same bits.
#pragma once
#include <algorithm>

#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/pack.h"

namespace tandem::cuda {

// f.at(c) gives a state for the channels c … c + V − 1; state(row, sums) adds that row's values to sums[N][V].
template <int N, int V, class F>
__global__ void __launch_bounds__(256) column_parts(F f, std::int64_t rows, std::int64_t channels, float* parts) {
  const std::int64_t c = (blockIdx.x * std::int64_t(blockDim.x) + threadIdx.x) * V;
  float sums[N][V] = {};
  if (c < channels) {
    auto state = f.at(c);
    for (std::int64_t r = blockIdx.y * std::int64_t(blockDim.y) + threadIdx.y; r < rows; r += gridDim.y * blockDim.y)
      state(r, sums);
  }
  __shared__ float shared[N * V * 256];
  const int lane = threadIdx.y * blockDim.x + threadIdx.x;
  for (int n = 0; n < N; n++)
    for (int v = 0; v < V; v++) shared[(n * V + v) * 256 + lane] = sums[n][v];
  for (unsigned half = blockDim.y / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.y < half)
      for (int j = 0; j < N * V; j++) shared[j * 256 + lane] += shared[j * 256 + lane + half * blockDim.x];
  }
  if (threadIdx.y > 0 || c >= channels) return;
  for (int n = 0; n < N; n++)
    for (int v = 0; v < V; v++) parts[(blockIdx.y * N + n) * channels + c + v] = shared[(n * V + v) * 256 + lane];
}

// A warp for each channel; finish(c, sums) is called by one thread.
template <int N, class Finish>
__global__ void __launch_bounds__(256)
    column_totals(Finish finish, const float* parts, int count, std::int64_t channels) {
  const std::int64_t c = blockIdx.x * std::int64_t{8} + threadIdx.y;
  if (c >= channels) return;
  double sums[N] = {};
  for (int p = threadIdx.x; p < count; p += 32)
    for (int n = 0; n < N; n++) sums[n] += parts[(std::int64_t(p) * N + n) * channels + c];
  for (int n = 0; n < N; n++)
    for (int half = 16; half > 0; half /= 2) sums[n] += __shfl_down_sync(~0u, sums[n], half);
  if (threadIdx.x == 0) finish(c, sums);
}

template <int N, int V, class F, class Finish>
void column_sums(const Grid& grid, std::int64_t rows, std::int64_t channels, float* scratch, const F& f,
                 const Finish& finish) {
  const std::int64_t packs = (channels + V - 1) / V;
  unsigned x = 1;
  while (x < 32 && x < packs) x *= 2;
  const unsigned y = 256 / x, across = unsigned((packs + x - 1) / x);
  // Four blocks for each processor, but at least eight rows for each thread.
  const std::int64_t wanted = std::max<std::int64_t>(1, 4 * grid.processors / across),
                     useful = (rows + 8 * y - 1) / (8 * y);
  const unsigned down = unsigned(std::clamp<std::int64_t>(std::min(wanted, useful), 1, most_parts));
  start(column_parts<N, V, F>, dim3(across, down), dim3(x, y), grid.stream, f, rows, channels, scratch);
  start(column_totals<N, Finish>, unsigned((channels + 7) / 8), dim3(32, 8), grid.stream, finish, scratch, int(down),
        channels);
}

}  // namespace tandem::cuda
