// The interface between code of the host compiler and of the device compiler (with core/hd.h).
//
// launch(backend, n, f) runs f(i) for every i in [0, n), on the backend's device. f is a named functor (a struct that
// holds its pointers), never a lambda: nvcc rejects many lambdas that are both host and device. The element-wise
// operations, optimizers and augmentation are in *.kernel.cpp files, which nvcc compiles in a build with CUDA and g++
// in others. The CPU runs the loop below, which the compiler vectorises.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/backend.h"
#include "core/team.h"

#if defined(__CUDACC__)
#include "cuda/launch.h"
#endif

namespace tandem {

// Sharing work among threads costs a few µs, about 40 µs if the threads slept: as much as processing this many
// elements.
inline constexpr std::int64_t parallel_grain = 32768;

// Calls body(begin, end) on disjoint parts of [0, n), one per host thread; parts begin at multiples of `align`. body
// must not throw: an exception in a part ends the process. So check arguments and allocate memory before the call.
template <class Body>
void parallel_ranges(int threads, std::int64_t n, std::int64_t align, const Body& body) {
  if (n <= align) threads = 1;
  const std::int64_t step = ((n + threads - 1) / threads + align - 1) / align * align;
  in_parts(threads, [&](int part) {
    const std::int64_t begin = std::min(n, part * step), end = std::min(n, begin + step);
    if (begin < end) body(begin, end);
  });
}

// Code that g++ compiled runs on the host, where a device's pointers are not valid.
inline void require_host([[maybe_unused]] const Backend& backend) {
#if !defined(__CUDACC__)
  require(!backend.on_device(), "launch: this code was compiled for the host and cannot run on ", backend.name(),
          ": give its file a name that ends in .kernel.cpp, which nvcc compiles in a build with CUDA");
#endif
}

// launch() on a device. Throws Error if the host compiler compiled this code.
template <class F>
void launch_on_device([[maybe_unused]] Backend& backend, [[maybe_unused]] std::int64_t n, [[maybe_unused]] const F& f) {
#if defined(__CUDACC__)
  on_device(f, [&](const auto& g) { device_launch(backend.stream(), n, g); });
#else
  require_host(backend);
#endif
}

template <class F>
void launch(Backend& backend, std::int64_t n, const F& f) {
  if (backend.on_device()) return launch_on_device(backend, n, f);
  parallel_ranges(n >= parallel_grain ? backend.threads() : 1, n, 64, [&](std::int64_t begin, std::int64_t end) {
    const F g = f;  // a private copy: the compiler then knows that no store changes its pointers
#pragma omp simd
    for (std::int64_t i = begin; i < end; i++) g(i);
  });
}

// The same for functors that process a whole block (64 elements or more) per index: one loop, not vectorised across
// indices.
template <class F>
void launch_blocks(Backend& backend, std::int64_t n, const F& f) {
  if (backend.on_device()) return launch_on_device(backend, n, f);
  parallel_ranges(n * 64 >= parallel_grain ? backend.threads() : 1, n, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; i++) f(i);
  });
}

// Rows: f(row, lanes) computes one row of n elements. lanes.sum(n, g) and lanes.max(n, g) combine g(0) … g(n − 1),
// lanes.each(n, g) calls each. The lanes of a row are one thread on a host and a warp on a device.
struct HostLanes {
  template <class G>
  TANDEM_HD auto sum(std::int64_t n, const G& g) const {
    decltype(g(n)) all = 0;
#pragma omp simd reduction(+ : all)
    for (std::int64_t k = 0; k < n; k++) all += g(k);
    return all;
  }
  template <class G>
  TANDEM_HD auto max(std::int64_t n, const G& g) const {  // may ignore a NaN
    decltype(g(n)) all = -INFINITY;
#pragma omp simd reduction(max : all)
    for (std::int64_t k = 0; k < n; k++) all = all < g(k) ? g(k) : all;
    return all;
  }
  template <class G>
  TANDEM_HD void each(std::int64_t n, const G& g) const {
#pragma omp simd
    for (std::int64_t k = 0; k < n; k++) g(k);
  }
};
template <class F>
void launch_rows(Backend& backend, std::int64_t rows, std::int64_t n, const F& f) {
#if defined(__CUDACC__)
  if (backend.on_device()) return on_device(f, [&](const auto& g) { device_launch_rows(backend.stream(), rows, g); });
#endif
  require_host(backend);
  parallel_ranges(rows * n >= parallel_grain ? backend.threads() : 1, rows, 1,
                  [&](std::int64_t begin, std::int64_t end) {
                    for (std::int64_t i = begin; i < end; i++) f(i, HostLanes());
                  });
}

// Sums: f.part(i, lane, lanes) returns this lane's part of sum i, f.finish(i, sum) receives the whole sum. On a host
// one thread is the only lane of a sum. On a device `lanes` threads, 2 to 32 or 256, share a sum, so that neighbouring
// threads read neighbouring elements, and their parts are added in a fixed order.
template <int lanes, class F>
void launch_sums(Backend& backend, std::int64_t n, const F& f) {
#if defined(__CUDACC__)
  if (backend.on_device())
    return on_device(f, [&](const auto& g) { device_launch_sums<lanes>(backend.stream(), n, g); });
#endif
  require_host(backend);
  parallel_ranges(n * 64 >= parallel_grain ? backend.threads() : 1, n, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; i++) f.finish(i, f.part(i, 0, 1));
  });
}

}  // namespace tandem
