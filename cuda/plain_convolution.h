// Convolution without a library: one thread for each result, sums in float, those of filter gradients in double. For
// shapes that no engine of cuDNN supports: slow, but not used by common networks.
#pragma once
#include "cuda/kernels.h"
#include "cuda/launch.h"

namespace tandem::cuda {

template <class T>
struct Forward {
  ConvShape s;
  const T *x, *w;
  T* y;
  __device__ void operator()(std::int64_t i) const {
    const std::int64_t o = i % s.c_out, ox = i / s.c_out % s.out_w(), oy = i / (s.c_out * s.out_w()) % s.out_h(),
                       n = i / (s.c_out * s.out_w() * s.out_h()), deep = s.c_in / s.groups,
                       g = o / (s.c_out / s.groups);
    float sum = 0;
    for (std::int64_t ky = 0; ky < s.kh; ky++)
      for (std::int64_t kx = 0; kx < s.kw; kx++) {
        const std::int64_t iy = oy * s.stride_h - s.pad_h + ky * s.dilation_h,
                           ix = ox * s.stride_w - s.pad_w + kx * s.dilation_w;
        if (iy < 0 || iy >= s.h || ix < 0 || ix >= s.w) continue;
        const T *from = x + ((n * s.h + iy) * s.w + ix) * s.c_in + g * deep,
                *filter = w + ((o * s.kh + ky) * s.kw + kx) * deep;
        for (std::int64_t c = 0; c < deep; c++) sum += float(from[c]) * float(filter[c]);
      }
    y[i] = T(sum);
  }
};

template <class T>
struct BackwardData {
  ConvShape s;
  const T *dy, *w;
  T* dx;
  bool add;
  __device__ void operator()(std::int64_t i) const {
    const std::int64_t c = i % s.c_in, ix = i / s.c_in % s.w, iy = i / (s.c_in * s.w) % s.h,
                       n = i / (s.c_in * s.w * s.h), deep = s.c_in / s.groups, wide = s.c_out / s.groups, g = c / deep;
    float sum = add ? float(dx[i]) : 0.f;
    for (std::int64_t ky = 0; ky < s.kh; ky++)
      for (std::int64_t kx = 0; kx < s.kw; kx++) {
        const std::int64_t y = iy + s.pad_h - ky * s.dilation_h, x = ix + s.pad_w - kx * s.dilation_w;
        if (y < 0 || x < 0 || y % s.stride_h || x % s.stride_w) continue;
        const std::int64_t oy = y / s.stride_h, ox = x / s.stride_w;
        if (oy >= s.out_h() || ox >= s.out_w()) continue;
        const T* from = dy + ((n * s.out_h() + oy) * s.out_w() + ox) * s.c_out;
        for (std::int64_t o = g * wide; o < (g + 1) * wide; o++)
          sum += float(from[o]) * float(w[((o * s.kh + ky) * s.kw + kx) * deep + c % deep]);
      }
    dx[i] = T(sum);
  }
};

template <class T>
struct BackwardFilter {
  ConvShape s;
  const T *x, *dy;
  float* dw;
  bool add;
  __device__ void operator()(std::int64_t i) const {
    const std::int64_t deep = s.c_in / s.groups, c = i % deep, kx = i / deep % s.kw, ky = i / (deep * s.kw) % s.kh,
                       o = i / (deep * s.kw * s.kh), g = o / (s.c_out / s.groups);
    double sum = add ? double(dw[i]) : 0;
    for (std::int64_t n = 0; n < s.n; n++)
      for (std::int64_t oy = 0; oy < s.out_h(); oy++)
        for (std::int64_t ox = 0; ox < s.out_w(); ox++) {
          const std::int64_t iy = oy * s.stride_h - s.pad_h + ky * s.dilation_h,
                             ix = ox * s.stride_w - s.pad_w + kx * s.dilation_w;
          if (iy < 0 || iy >= s.h || ix < 0 || ix >= s.w) continue;
          sum += double(float(x[((n * s.h + iy) * s.w + ix) * s.c_in + g * deep + c])) *
                 double(float(dy[((n * s.out_h() + oy) * s.out_w() + ox) * s.c_out + o]));
        }
    dw[i] = float(sum);
  }
};

template <class T>
void plain_convolution(const Grid& grid, const ConvShape& s, const T* x, const T* w, T* y) {
  device_launch(grid.stream, s.y_numel(), Forward<T>{s, x, w, y});
}
template <class T>
void plain_convolution_backward_data(const Grid& grid, const ConvShape& s, const T* dy, const T* w, T* dx, bool add) {
  device_launch(grid.stream, s.x_numel(), BackwardData<T>{s, dy, w, dx, add});
}
template <class T>
void plain_convolution_backward_filter(const Grid& grid, const ConvShape& s, const T* x, const T* dy, float* dw,
                                       bool add) {
  device_launch(grid.stream, s.w_numel(), BackwardFilter<T>{s, x, dy, dw, add});
}

}  // namespace tandem::cuda
