// Pooling, one thread for V neighbouring channels of a result. Backward gathers the gradients of all windows that
// contain an element, so that each element is written once and no atomics are needed.
#pragma once
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/pack.h"

namespace tandem::cuda {

// PoolShape in 32-bit numbers, since 64-bit divisions at run time cost several times as much. A picture must have fewer
// than 2³² elements.
struct Sizes {
  int h, w, c, kh, kw, stride_h, stride_w, pad_h, pad_w, out_h, out_w;
  explicit Sizes(const PoolShape& s)
      : h(int(s.h)),
        w(int(s.w)),
        c(int(s.c)),
        kh(int(s.kh)),
        kw(int(s.kw)),
        stride_h(int(s.stride_h)),
        stride_w(int(s.stride_w)),
        pad_h(int(s.pad_h)),
        pad_w(int(s.pad_w)),
        out_h(int(s.out_h())),
        out_w(int(s.out_w())) {}
};

struct Place {  // position of pack i of V channels in [n, h, w, c]
  std::int64_t n;
  int y, x, c;
  __device__ Place(std::int64_t i, int h, int w, int channels, int V) {
    const unsigned packs = unsigned(channels / V), picture = unsigned(h) * unsigned(w) * packs;
    n = i <= 0xffffffff ? unsigned(i) / picture : i / picture;
    const unsigned rest = unsigned(i - n * picture), pixel = rest / packs;
    c = int(rest - pixel * packs) * V;
    y = int(pixel / unsigned(w));
    x = int(pixel) - y * w;
  }
};
inline __device__ std::int64_t offset(std::int64_t n, int y, int x, int c, int h, int w, int channels) {
  return ((n * h + y) * w + x) * channels + c;
}
inline __device__ int smaller(int a, int b) { return a < b ? a : b; }
inline __device__ int larger(int a, int b) { return a > b ? a : b; }

constexpr std::uint8_t nobody = 255;

template <class T, int V>
struct MaxPool {
  Sizes s;
  const T* x;
  bool relu;
  T* y;
  std::uint8_t* argmax;
  __device__ void operator()(std::int64_t i) const {
    const Place o(i, s.out_h, s.out_w, s.c, V);
    const int top = o.y * s.stride_h - s.pad_h, left = o.x * s.stride_w - s.pad_w;
    float best[V];
    int who[V];
    for (int k = 0; k < V; k++) best[k] = -INFINITY, who[k] = nobody;
    for (int ky = larger(0, -top); ky < smaller(s.kh, s.h - top); ky++)
      for (int kx = larger(0, -left); kx < smaller(s.kw, s.w - left); kx++) {
        float v[V];
        load<V>(x + offset(o.n, top + ky, left + kx, o.c, s.h, s.w, s.c), v);
        // The first of equal maxima is chosen, even −∞; the last NaN is chosen before any number.
        for (int k = 0; k < V; k++)
          if (who[k] == nobody || v[k] > best[k] || v[k] != v[k]) best[k] = v[k], who[k] = ky * s.kw + kx;
      }
    if (relu)
      for (int k = 0; k < V; k++)
        if (best[k] <= 0) best[k] = 0, who[k] = nobody;
    store<V>(y + i * V, best);
    if (argmax) store<V>(argmax + i * V, who);
  }
};

// Calls f(window's offset, y, x) for every window that holds the element at p.
template <class F>
__device__ void windows_over(const Sizes& s, const Place& p, const F& f) {
  const int y = p.y + s.pad_h, x = p.x + s.pad_w;
  const int bottom = smaller(y / s.stride_h, s.out_h - 1), right = smaller(x / s.stride_w, s.out_w - 1);
  for (int oy = y < s.kh ? 0 : (y - s.kh) / s.stride_h + 1; oy <= bottom; oy++)
    for (int ox = x < s.kw ? 0 : (x - s.kw) / s.stride_w + 1; ox <= right; ox++)
      f(offset(p.n, oy, ox, p.c, s.out_h, s.out_w, s.c), oy, ox);
}

template <class T, int V>
struct MaxPoolBackward {
  Sizes s;
  const T* dy;
  const std::uint8_t* argmax;
  T* dx;
  bool add;
  __device__ void operator()(std::int64_t i) const {
    const Place p(i, s.h, s.w, s.c, V);
    float sum[V] = {};
    if (add) load<V>(dx + i * V, sum);
    windows_over(s, p, [&](std::int64_t o, int oy, int ox) {
      const int here = (p.y + s.pad_h - oy * s.stride_h) * s.kw + p.x + s.pad_w - ox * s.stride_w;
      float d[V];
      int who[V];
      load<V>(dy + o, d);
      load<V>(argmax + o, who);
      for (int k = 0; k < V; k++) sum[k] += who[k] == here ? d[k] : 0.f;
    });
    store<V>(dx + i * V, sum);
  }
};

// For windows that do not overlap: one thread writes V channels of all elements of its window. The threads of the last
// row and column of windows also write the elements beyond, which are in no window.
template <class T, int V>
struct MaxPoolBackwardApart {
  Sizes s;
  const T* dy;
  const std::uint8_t* argmax;
  T* dx;
  bool add;
  __device__ void operator()(std::int64_t i) const {
    const Place o(i, s.out_h, s.out_w, s.c, V);
    float d[V];
    int who[V];
    load<V>(dy + i * V, d);
    load<V>(argmax + i * V, who);
    const int top = o.y * s.kh, left = o.x * s.kw;
    const int bottom = o.y == s.out_h - 1 ? s.h : top + s.kh, right = o.x == s.out_w - 1 ? s.w : left + s.kw;
    for (int y = top; y < bottom; y++)
      for (int x = left; x < right; x++) {
        const bool under = y - top < s.kh && x - left < s.kw;
        const int here = under ? (y - top) * s.kw + x - left : -1;
        T* to = dx + offset(o.n, y, x, o.c, s.h, s.w, s.c);
        float sum[V] = {};
        if (add) load<V>(to, sum);
        for (int k = 0; k < V; k++) sum[k] += who[k] == here ? d[k] : 0.f;
        store<V>(to, sum);
      }
  }
};

inline __device__ float inside(const Sizes& s, int oy, int ox) {  // elements of the window in the picture
  const int top = oy * s.stride_h - s.pad_h, left = ox * s.stride_w - s.pad_w;
  return float((smaller(s.kh, s.h - top) - larger(0, -top)) * (smaller(s.kw, s.w - left) - larger(0, -left)));
}

template <class T, int V>
struct AveragePool {
  Sizes s;
  const T* x;
  T* y;
  __device__ void operator()(std::int64_t i) const {
    const Place o(i, s.out_h, s.out_w, s.c, V);
    const int top = o.y * s.stride_h - s.pad_h, left = o.x * s.stride_w - s.pad_w;
    float sum[V] = {};
    for (int ky = larger(0, -top); ky < smaller(s.kh, s.h - top); ky++)
      for (int kx = larger(0, -left); kx < smaller(s.kw, s.w - left); kx++) {
        float v[V];
        load<V>(x + offset(o.n, top + ky, left + kx, o.c, s.h, s.w, s.c), v);
        for (int k = 0; k < V; k++) sum[k] += v[k];
      }
    for (int k = 0; k < V; k++) sum[k] /= inside(s, o.y, o.x);
    store<V>(y + i * V, sum);
  }
};

template <class T, int V>
struct AveragePoolBackward {
  Sizes s;
  const T* dy;
  T* dx;
  bool add;
  __device__ void operator()(std::int64_t i) const {
    float sum[V] = {};
    if (add) load<V>(dx + i * V, sum);
    windows_over(s, Place(i, s.h, s.w, s.c, V), [&](std::int64_t o, int oy, int ox) {
      float d[V];
      load<V>(dy + o, d);
      for (int k = 0; k < V; k++) sum[k] += d[k] / inside(s, oy, ox);
    });
    store<V>(dx + i * V, sum);
  }
};

inline std::int64_t outputs(const PoolShape& s) { return s.n * s.out_h() * s.out_w() * s.c; }
inline std::int64_t inputs(const PoolShape& s) { return s.n * s.h * s.w * s.c; }

// argmax may be null.
template <class T>
void max_pool(const Grid& grid, const PoolShape& s, const T* x, bool relu, T* y, std::uint8_t* argmax) {
  with_packs<T>(
      s.c,
      [&]<int V> {
        device_launch(grid.stream, outputs(s) / V, MaxPool<T, V>{Sizes(s), x, relu, y, argmax});
      },
      x, y, argmax);
}
template <class T>
void max_pool_backward(const Grid& grid, const PoolShape& s, const T* dy, const std::uint8_t* argmax, T* dx, bool add) {
  const bool apart = s.stride_h == s.kh && s.stride_w == s.kw && s.pad_h == 0 && s.pad_w == 0;
  with_packs<T>(
      s.c,
      [&]<int V> {
        if (apart)
          device_launch(grid.stream, outputs(s) / V, MaxPoolBackwardApart<T, V>{Sizes(s), dy, argmax, dx, add});
        else
          device_launch(grid.stream, inputs(s) / V, MaxPoolBackward<T, V>{Sizes(s), dy, argmax, dx, add});
      },
      dy, argmax, dx);
}
template <class T>
void average_pool(const Grid& grid, const PoolShape& s, const T* x, T* y) {
  with_packs<T>(
      s.c,
      [&]<int V> {
        device_launch(grid.stream, outputs(s) / V, AveragePool<T, V>{Sizes(s), x, y});
      },
      x, y);
}
template <class T>
void average_pool_backward(const Grid& grid, const PoolShape& s, const T* dy, T* dx, bool add) {
  with_packs<T>(
      s.c,
      [&]<int V> {
        device_launch(grid.stream, inputs(s) / V, AveragePoolBackward<T, V>{Sizes(s), dy, dx, add});
      },
      dy, dx);
}

}  // namespace tandem::cuda
