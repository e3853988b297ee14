// Pooling, one thread for each result. Backward gathers what the windows over an element give it, so that nothing is
// written twice and no atomics are needed.
#include "cuda/kernels.h"
#include "cuda/launch.h"

namespace tandem::cuda {
namespace {

struct Place {  // of an element in [n, h, w, c]
  std::int64_t n, y, x, c;
  __device__ Place(std::int64_t i, std::int64_t h, std::int64_t w, std::int64_t channels) {
    c = i % channels;
    x = i / channels % w;
    y = i / (channels * w) % h;
    n = i / (channels * w * h);
  }
};
__device__ std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
__device__ std::int64_t larger(std::int64_t a, std::int64_t b) { return a > b ? a : b; }

constexpr std::uint8_t nobody = 255;

template <class T>
struct MaxPool {
  PoolShape s;
  const T* x;
  bool relu;
  T* y;
  std::uint8_t* argmax;
  __device__ void operator()(std::int64_t i) const {
    const Place o(i, s.out_h(), s.out_w(), s.c);
    const std::int64_t top = o.y * s.stride_h - s.pad_h, left = o.x * s.stride_w - s.pad_w;
    float best = -INFINITY;
    int who = nobody;
    for (std::int64_t ky = larger(0, -top); ky < smaller(s.kh, s.h - top); ky++)
      for (std::int64_t kx = larger(0, -left); kx < smaller(s.kw, s.w - left); kx++) {
        const float v = float(x[((o.n * s.h + top + ky) * s.w + left + kx) * s.c + o.c]);
        // The first element wins even if it is −∞; the last NaN wins.
        if (who == nobody || v > best || v != v) best = v, who = int(ky * s.kw + kx);
      }
    if (relu && best <= 0) best = 0, who = nobody;
    y[i] = T(best);
    if (argmax) argmax[i] = std::uint8_t(who);
  }
};

// Calls f(window's index, ky, kx) for every window that holds the element at p.
template <class F>
__device__ void windows_over(const PoolShape& s, const Place& p, const F& f) {
  const std::int64_t y = p.y + s.pad_h, x = p.x + s.pad_w;
  for (std::int64_t oy = y < s.kh ? 0 : (y - s.kh) / s.stride_h + 1; oy <= smaller(y / s.stride_h, s.out_h() - 1); oy++)
    for (std::int64_t ox = x < s.kw ? 0 : (x - s.kw) / s.stride_w + 1; ox <= smaller(x / s.stride_w, s.out_w() - 1);
         ox++)
      f(((p.n * s.out_h() + oy) * s.out_w() + ox) * s.c + p.c, oy, ox);
}

template <class T>
struct MaxPoolBackward {
  PoolShape s;
  const T* dy;
  const std::uint8_t* argmax;
  T* dx;
  bool add;
  __device__ void operator()(std::int64_t i) const {
    const Place p(i, s.h, s.w, s.c);
    float sum = add ? float(dx[i]) : 0.f;
    windows_over(s, p, [&](std::int64_t o, std::int64_t oy, std::int64_t ox) {
      const std::int64_t ky = p.y + s.pad_h - oy * s.stride_h, kx = p.x + s.pad_w - ox * s.stride_w;
      if (argmax[o] == ky * s.kw + kx) sum += float(dy[o]);
    });
    dx[i] = T(sum);
  }
};

__device__ float inside(const PoolShape& s, std::int64_t oy,
                        std::int64_t ox) {  // elements of the window in the picture
  const std::int64_t top = oy * s.stride_h - s.pad_h, left = ox * s.stride_w - s.pad_w;
  return float((smaller(s.kh, s.h - top) - larger(0, -top)) * (smaller(s.kw, s.w - left) - larger(0, -left)));
}

template <class T>
struct AveragePool {
  PoolShape s;
  const T* x;
  T* y;
  __device__ void operator()(std::int64_t i) const {
    const Place o(i, s.out_h(), s.out_w(), s.c);
    const std::int64_t top = o.y * s.stride_h - s.pad_h, left = o.x * s.stride_w - s.pad_w;
    float sum = 0;
    for (std::int64_t ky = larger(0, -top); ky < smaller(s.kh, s.h - top); ky++)
      for (std::int64_t kx = larger(0, -left); kx < smaller(s.kw, s.w - left); kx++)
        sum += float(x[((o.n * s.h + top + ky) * s.w + left + kx) * s.c + o.c]);
    y[i] = T(sum / inside(s, o.y, o.x));
  }
};

template <class T>
struct AveragePoolBackward {
  PoolShape s;
  const T* dy;
  T* dx;
  bool add;
  __device__ void operator()(std::int64_t i) const {
    float sum = add ? float(dx[i]) : 0.f;
    windows_over(s, Place(i, s.h, s.w, s.c),
                 [&](std::int64_t o, std::int64_t oy, std::int64_t ox) { sum += float(dy[o]) / inside(s, oy, ox); });
    dx[i] = T(sum);
  }
};

std::int64_t outputs(const PoolShape& s) { return s.n * s.out_h() * s.out_w() * s.c; }
std::int64_t inputs(const PoolShape& s) { return s.n * s.h * s.w * s.c; }

}  // namespace

template <class T>
void max_pool(const Grid& grid, const PoolShape& s, const T* x, bool relu, T* y, std::uint8_t* argmax) {
  device_launch(grid.stream, outputs(s), MaxPool<T>{s, x, relu, y, argmax});
}
template <class T>
void max_pool_backward(const Grid& grid, const PoolShape& s, const T* dy, const std::uint8_t* argmax, T* dx, bool add) {
  device_launch(grid.stream, inputs(s), MaxPoolBackward<T>{s, dy, argmax, dx, add});
}
template <class T>
void average_pool(const Grid& grid, const PoolShape& s, const T* x, T* y) {
  device_launch(grid.stream, outputs(s), AveragePool<T>{s, x, y});
}
template <class T>
void average_pool_backward(const Grid& grid, const PoolShape& s, const T* dy, T* dx, bool add) {
  device_launch(grid.stream, inputs(s), AveragePoolBackward<T>{s, dy, dx, add});
}

#define TANDEM_POOL(T)                                                                                     \
  template void max_pool(const Grid&, const PoolShape&, const T*, bool, T*, std::uint8_t*);                \
  template void max_pool_backward(const Grid&, const PoolShape&, const T*, const std::uint8_t*, T*, bool); \
  template void average_pool(const Grid&, const PoolShape&, const T*, T*);                                 \
  template void average_pool_backward(const Grid&, const PoolShape&, const T*, T*, bool);
TANDEM_POOL(float)
TANDEM_POOL(bf16)
TANDEM_POOL(f16)
#undef TANDEM_POOL

}  // namespace tandem::cuda
