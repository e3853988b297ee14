// The device part of launch(): one thread per index, in a grid-stride loop, so that any n is possible.
#pragma once
#include <cmath>
#include <cstdint>
#include <utility>

#include "cuda/check.h"

namespace tandem {

#if defined(__CUDACC__)
// kernel<<<blocks, threads, 0, stream>>>(arguments…). Tests replace it by their own function, which runs the same
// kernels on the host (tests/emulated_cuda.h).
template <class... Parameters, class... Arguments>
void start(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, cudaStream_t stream, Arguments... arguments) {
  kernel<<<blocks, threads, 0, stream>>>(arguments...);
  CUDA_CHECK(cudaGetLastError(), "a kernel of ", blocks.x, " × ", blocks.y, " blocks of ", threads.x, " × ", threads.y,
             " threads did not start, or work that was queued before it failed");
}
// The number of blocks of `threads` threads that a processor runs at once.
template <class... Parameters>
int resident_blocks(void (*kernel)(Parameters...), int threads) {
  int blocks = 1;
  CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, 0));
  return blocks;
}
#endif

// A functor whose f(i) is f.store(i, f.value(i)), and which reads only in value(), so that several loads can be in
// flight at once.
template <class F>
concept Deferred = requires(const F& f, std::int64_t i) {
  f.store(i, f.value(i));
};
template <class F>
inline constexpr int at_once = Deferred<F> ? 4 : 1;

template <class F>
__global__ void __launch_bounds__(256) for_each_index(std::int64_t n, F f) {
  const std::int64_t step = gridDim.x * std::int64_t{256};
  std::int64_t i = blockIdx.x * std::int64_t{256} + threadIdx.x;
  if constexpr (Deferred<F>)
    for (; i + 3 * step < n; i += 4 * step) {
      const auto a = f.value(i), b = f.value(i + step), c = f.value(i + 2 * step), d = f.value(i + 3 * step);
      f.store(i, a);
      f.store(i + step, b);
      f.store(i + 2 * step, c);
      f.store(i + 3 * step, d);
    }
  for (; i < n; i += step) f(i);
}

// Blocks of 256 threads, at most 8 waves of a large device: further blocks would only wait, and the grid-stride loop
// costs nothing.
template <class F>
void device_launch(void* stream, std::int64_t n, const F& f) {
  if (n <= 0) return;
  const std::int64_t each = 256 * at_once<F>, blocks = (n + each - 1) / each, most = 8 * 1024;
  start(for_each_index<F>, unsigned(blocks < most ? blocks : most), 256, static_cast<cudaStream_t>(stream), n, f);
}

// launch_sums(): `lanes` threads per sum, whose parts are two doubles. Every thread of a warp takes part in each
// exchange.
template <int lanes, class F>
__global__ void __launch_bounds__(256) for_each_sum(std::int64_t n, F f) {
  constexpr int each = 256 / lanes;  // sums that a block computes at once
  __shared__ double shared[2][8];
  for (std::int64_t first = blockIdx.x * std::int64_t{each}; first < n; first += gridDim.x * std::int64_t{each}) {
    const std::int64_t i = first + threadIdx.x / lanes;
    auto sum = f.part(i < n ? i : first, int(threadIdx.x % lanes), lanes);
    for (int by = (lanes < 32 ? lanes : 32) / 2; by > 0; by /= 2) {
      sum.a += __shfl_xor_sync(~0u, sum.a, by);
      sum.b += __shfl_xor_sync(~0u, sum.b, by);
    }
    if (lanes > 32) {
      __syncthreads();
      if (threadIdx.x % 32 == 0) {
        shared[0][threadIdx.x / 32] = sum.a;
        shared[1][threadIdx.x / 32] = sum.b;
      }
      __syncthreads();
      sum.a = sum.b = 0;
      for (int warp = 0; warp < 8; warp++) sum.a += shared[0][warp], sum.b += shared[1][warp];
    }
    if (i < n && threadIdx.x % lanes == 0) f.finish(i, sum);
  }
}
template <int lanes, class F>
void device_launch_sums(void* stream, std::int64_t n, const F& f) {
  static_assert(lanes == 256 || (lanes >= 2 && lanes <= 32));
  if (n <= 0) return;
  const std::int64_t blocks = (n * lanes + 255) / 256, most = 8 * 1024;
  start(for_each_sum<lanes, F>, unsigned(blocks < most ? blocks : most), 256, static_cast<cudaStream_t>(stream), n, f);
}

// launch_rows(): one warp per row. A functor is compiled for host and device; only its device code calls these.
struct WarpLanes {
  int lane;
  template <class G, class Op>
  TANDEM_HD auto combine(std::int64_t n, decltype(std::declval<G>()(0)) all, const G& g, const Op& op) const {
    for (std::int64_t k = lane; k < n; k += 32) all = op(all, g(k));
#if defined(__CUDA_ARCH__) || !defined(__CUDACC__)
    for (int by = 16; by > 0; by /= 2) all = op(all, __shfl_xor_sync(~0u, all, by));
#endif
    return all;
  }
  template <class G>
  TANDEM_HD auto sum(std::int64_t n, const G& g) const {
    return combine(n, 0, g, [](auto a, auto b) { return a + b; });
  }
  template <class G>
  TANDEM_HD auto max(std::int64_t n, const G& g) const {
    return combine(n, -INFINITY, g, [](auto a, auto b) { return a < b ? b : a; });
  }
  template <class G>
  TANDEM_HD void each(std::int64_t n, const G& g) const {
    for (std::int64_t k = lane; k < n; k += 32) g(k);
  }
};
template <class F>
__global__ void __launch_bounds__(256) for_each_row(std::int64_t rows, F f) {
  for (std::int64_t i = blockIdx.x * std::int64_t{8} + threadIdx.x / 32; i < rows; i += gridDim.x * std::int64_t{8})
    f(i, WarpLanes{int(threadIdx.x % 32)});
}
template <class F>
void device_launch_rows(void* stream, std::int64_t rows, const F& f) {
  if (rows <= 0) return;
  const std::int64_t blocks = (rows + 7) / 8, most = 8 * 1024;
  start(for_each_row<F>, unsigned(blocks < most ? blocks : most), 256, static_cast<cudaStream_t>(stream), rows, f);
}

// The functors of *.kernel.cpp are templates over the element type, including double. double is used only in the
// reference backend and is not compiled for the device: it would cost as much as the other types.
template <class F>
inline constexpr bool holds_double = false;
template <>
inline constexpr bool holds_double<double> = true;
template <template <class...> class F, class... A>
inline constexpr bool holds_double<F<A...>> = (holds_double<A> || ...);
template <template <class, auto, auto...> class F, class A, auto b, auto... c>
inline constexpr bool holds_double<F<A, b, c...>> = holds_double<A>;
template <template <class, class, auto, auto...> class F, class A, class B, auto b, auto... c>
inline constexpr bool holds_double<F<A, B, b, c...>> = holds_double<A> || holds_double<B>;

// Calls start(f), which is compiled only for a functor that the device can run.
template <class F, class Start>
void on_device(const F& f, const Start& start) {
  if constexpr (holds_double<F>)
    fail("cuda backend: only the reference backend has f64");
  else
    start(f);
}

}  // namespace tandem
