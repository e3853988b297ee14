// Work over the rows of [rows, channels]: each thread has V neighbouring channels, keeps the values that are equal for
// all of their rows in registers, and iterates over rows. column_sums() makes N sums at once, for the statistics and
// the gradient of batch norm and the gradient of a bias: blocks write partial sums, which a second kernel adds in
// double in a fixed order, without atomics, so that every run gives the same bits. each_column() computes element by
// element.
#pragma once
#include <algorithm>

#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/pack.h"

namespace tandem::cuda {

// f.at(c) returns a state for the channels c … c + V − 1. state.load(row) reads that row's values, state(row, loaded,
// sums) adds them to sums[N][V]. Two rows are read before the first is used, so that enough loads are in flight.
template <int N, int V, class F>
__global__ void __launch_bounds__(256, 3) column_parts(F f, std::int64_t rows, std::int64_t channels, float* parts) {
  const std::int64_t c = (blockIdx.x * std::int64_t(blockDim.x) + threadIdx.x) * V;
  float sums[N][V] = {};
  if (c < channels) {
    const auto state = f.at(c);
    const std::int64_t step = gridDim.y * std::int64_t(blockDim.y);
    std::int64_t r = blockIdx.y * std::int64_t(blockDim.y) + threadIdx.y;
    for (; r + step < rows; r += 2 * step) {
      const auto a = state.load(r), b = state.load(r + step);
      state(r, a, sums);
      state(r + step, b, sums);
    }
    if (r < rows) state(r, state.load(r), sums);
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

// Eight channels per block, since memory is accessed in units of 32 bytes; finish(c, sums) is called by one thread.
template <int N, class Finish>
__global__ void __launch_bounds__(1024)
    column_totals(Finish finish, const float* parts, int count, std::int64_t channels) {
  const std::int64_t c = blockIdx.x * std::int64_t{8} + threadIdx.x;
  double sums[N] = {};
  if (c < channels)
    for (int p = threadIdx.y; p < count; p += 128)
      for (int n = 0; n < N; n++) sums[n] += parts[(std::int64_t(p) * N + n) * channels + c];
  __shared__ double shared[N][128][8];
  for (int n = 0; n < N; n++) shared[n][threadIdx.y][threadIdx.x] = sums[n];
  for (unsigned half = 64; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.y < half)
      for (int n = 0; n < N; n++) shared[n][threadIdx.y][threadIdx.x] += shared[n][threadIdx.y + half][threadIdx.x];
  }
  if (threadIdx.y > 0 || c >= channels) return;
  for (int n = 0; n < N; n++) sums[n] = shared[n][0][threadIdx.x];
  finish(c, sums);
}

// Calls state(row, state.load(row)) for every row, the last rows first: the rows that column_parts has just read may
// still be in the cache.
template <int V, class F>
__global__ void __launch_bounds__(256, 3) column_rows(F f, std::int64_t rows, std::int64_t channels) {
  const std::int64_t c = (blockIdx.x * std::int64_t(blockDim.x) + threadIdx.x) * V;
  if (c >= channels) return;
  const auto state = f.at(c);
  const std::int64_t step = gridDim.y * std::int64_t(blockDim.y);
  std::int64_t r = rows - 1 - blockIdx.y * std::int64_t(blockDim.y) - threadIdx.y;
  for (; r >= step; r -= 2 * step) {
    const auto a = state.load(r), b = state.load(r - step);
    state(r, a);
    state(r - step, b);
  }
  if (r >= 0) state(r, state.load(r));
}

// Blocks of 256 threads over packs of V channels and over rows, with at least `each` rows for each thread. There are at
// most as many blocks as the device runs at once, since a second wave would be only a partial wave.
struct ColumnGrid {
  unsigned x = 1, y, across, down;
  ColumnGrid(const Grid& grid, int resident, std::int64_t rows, std::int64_t packs, std::int64_t each) {
    while (x < 32 && x < packs) x *= 2;
    y = 256 / x;
    across = unsigned((packs + x - 1) / x);
    const std::int64_t wanted = std::max<std::int64_t>(1, resident * grid.processors / across),
                       useful = (rows + each * y - 1) / (each * y);
    down = unsigned(std::clamp<std::int64_t>(std::min(wanted, useful), 1, most_parts));
  }
  dim3 blocks() const { return dim3(across, down); }
  dim3 threads() const { return dim3(x, y); }
};

// Without channels it does nothing. Without rows the sums are 0, and f.at() must not read a row.
template <int N, int V, class F, class Finish>
void column_sums(const Grid& grid, std::int64_t rows, std::int64_t channels, float* scratch, const F& f,
                 const Finish& finish) {
  if (channels == 0) return;
  static const int resident = resident_blocks(column_parts<N, V, F>, 256);
  const ColumnGrid over(grid, resident, rows, (channels + V - 1) / V, 4);
  start(column_parts<N, V, F>, over.blocks(), over.threads(), grid.stream, f, rows, channels, scratch);
  start(column_totals<N, Finish>, unsigned((channels + 7) / 8), dim3(8, 128), grid.stream, finish, scratch,
        int(over.down), channels);
}

template <int V, class F>
void each_column(const Grid& grid, std::int64_t rows, std::int64_t channels, const F& f) {
  if (rows == 0 || channels == 0) return;
  static const int resident = resident_blocks(column_rows<V, F>, 256);
  const ColumnGrid over(grid, resident, rows, (channels + V - 1) / V, 2);
  start(column_rows<V, F>, over.blocks(), over.threads(), grid.stream, f, rows, channels);
}

}  // namespace tandem::cuda
