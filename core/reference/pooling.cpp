// Max and average pooling, x[n, h, w, c] → y[n, out_h, out_w, c]. Windows may overlap and may stick out of the picture;
// elements outside are ignored. Backward sums the gradient of one picture in double, for windows may overlap.
#include <cmath>
#include <limits>

#include "core/reference/backend.h"

namespace tandem::reference {

namespace {

constexpr std::uint8_t cut_by_relu = 255;

// The part of output (oy, ox)'s window that lies inside the picture: pixels [top, bottom) × [left, right).
struct Window {
  std::int64_t top, bottom, left, right;
  Window(const PoolShape& s, std::int64_t oy, std::int64_t ox)
      : top(std::max<std::int64_t>(0, oy * s.stride_h - s.pad_h)),
        bottom(std::min(s.h, oy * s.stride_h - s.pad_h + s.kh)),
        left(std::max<std::int64_t>(0, ox * s.stride_w - s.pad_w)),
        right(std::min(s.w, ox * s.stride_w - s.pad_w + s.kw)) {}
  double size() const { return static_cast<double>((bottom - top) * (right - left)); }
};

// Calls body(i, n, oy, ox, c) for every output, whose position in y is i.
template <class Body>
void each_output(int threads, const PoolShape& s, const Body& body) {
  const std::int64_t out_h = s.out_h(), out_w = s.out_w();
  for_each(threads, s.n * out_h, s.n * out_h * out_w * s.c, [&](std::int64_t row) {
    for (std::int64_t i = row * out_w * s.c; i < (row + 1) * out_w * s.c; i++)
      body(i, row / out_h, row % out_h, i / s.c % out_w, i % s.c);
  });
}

// dx (+)= sums, to which scatter(sums[h, w, c], i, oy, ox, c) adds for each output i of a picture.
template <class T, class Scatter>
void backward_pictures(int threads, CachingAllocator& memory, const PoolShape& s, T* dx, bool add,
                       const Scatter& scatter) {
  const std::int64_t picture = s.h * s.w * s.c;
  const int parts = s.n * picture >= parallel_grain ? threads : 1;
  Scratch scratch(memory, static_cast<std::size_t>(parts * picture) * sizeof(double));
  double* all = scratch.carve<double>(static_cast<std::size_t>(parts * picture));
  in_parts(parts, [&](int part) {
    double* sums = all + part * picture;
    for (std::int64_t n = s.n * part / parts; n < s.n * (part + 1) / parts; n++) {
      std::fill(sums, sums + picture, 0.0);
      std::int64_t i = n * s.out_h() * s.out_w() * s.c;
      for (std::int64_t oy = 0; oy < s.out_h(); oy++)
        for (std::int64_t ox = 0; ox < s.out_w(); ox++)
          for (std::int64_t c = 0; c < s.c; c++) scatter(sums, i++, oy, ox, c);
      for (std::int64_t k = 0; k < picture; k++) put(dx[n * picture + k], sums[k], add);
    }
  });
}

}  // namespace

template <class T>
void ReferenceKernels<T>::max_pool(const PoolShape& s, In<T> x, bool with_relu, Out<T> y, Out<std::uint8_t> argmax) {
  each_output(threads_, s, [&](std::int64_t i, std::int64_t n, std::int64_t oy, std::int64_t ox, std::int64_t c) {
    const Window window(s, oy, ox);
    const std::int64_t top = oy * s.stride_h - s.pad_h, left = ox * s.stride_w - s.pad_w;
    P largest = -std::numeric_limits<P>::infinity();
    std::int64_t position = (window.top - top) * s.kw + window.left - left;
    for (std::int64_t iy = window.top; iy < window.bottom; iy++)
      for (std::int64_t ix = window.left; ix < window.right; ix++) {
        const P v = x[((n * s.h + iy) * s.w + ix) * s.c + c];
        if (!(v > largest || std::isnan(v))) continue;  // the maximum with a NaN is NaN, so that failures stay visible
        largest = v;
        position = (iy - top) * s.kw + ix - left;
      }
    const bool cut = with_relu && largest <= 0;
    y[i] = cut ? P(0) : largest;
    if (argmax) argmax[i] = cut ? cut_by_relu : static_cast<std::uint8_t>(position);
  });
}

template <class T>
void ReferenceKernels<T>::max_pool_backward(const PoolShape& s, In<T> dy, In<std::uint8_t> argmax, Out<T> dx,
                                            bool add) {
  backward_pictures<T>(threads_, memory_, s, dx, add,
                       [&](double* sums, std::int64_t i, std::int64_t oy, std::int64_t ox, std::int64_t c) {
                         const std::int64_t position = argmax[i];
                         if (position == cut_by_relu) return;
                         const std::int64_t iy = oy * s.stride_h - s.pad_h + position / s.kw;
                         const std::int64_t ix = ox * s.stride_w - s.pad_w + position % s.kw;
                         sums[(iy * s.w + ix) * s.c + c] += static_cast<double>(dy[i]);
                       });
}

template <class T>
void ReferenceKernels<T>::average_pool(const PoolShape& s, In<T> x, Out<T> y) {
  each_output(threads_, s, [&](std::int64_t i, std::int64_t n, std::int64_t oy, std::int64_t ox, std::int64_t c) {
    const Window window(s, oy, ox);
    double sum = 0;
    for (std::int64_t iy = window.top; iy < window.bottom; iy++)
      for (std::int64_t ix = window.left; ix < window.right; ix++)
        sum += static_cast<double>(x[((n * s.h + iy) * s.w + ix) * s.c + c]);
    put(y[i], sum / window.size(), false);
  });
}

template <class T>
void ReferenceKernels<T>::average_pool_backward(const PoolShape& s, In<T> dy, Out<T> dx, bool add) {
  backward_pictures<T>(threads_, memory_, s, dx, add,
                       [&](double* sums, std::int64_t i, std::int64_t oy, std::int64_t ox, std::int64_t c) {
                         const Window window(s, oy, ox);
                         for (std::int64_t iy = window.top; iy < window.bottom; iy++)
                           for (std::int64_t ix = window.left; ix < window.right; ix++)
                             sums[(iy * s.w + ix) * s.c + c] += static_cast<double>(dy[i]) / window.size();
                       });
}

template class ReferenceKernels<float>;  // the members that this file defines
template class ReferenceKernels<bf16>;
template class ReferenceKernels<double>;

}  // namespace tandem::reference
