// Max and average pooling, x[n, h, w, c] → y[n, out_h, out_w, c]. Windows may overlap and may stick out of the picture;
// elements outside are ignored. Backward sums the gradient of one picture in double, for windows may overlap.
#include <cmath>
#include <limits>

#include "core/reference/backend.h"

namespace tandem::reference {

namespace {

constexpr std::uint8_t cut_by_relu = 255;

// The part of a window that lies inside the picture, as positions [begin, end) in the window.
struct Range {
  std::int64_t begin, end;
};
Range inside(std::int64_t first, std::int64_t window, std::int64_t size) {
  return {std::max<std::int64_t>(0, -first), std::min(window, size - first)};
}

// Then every window has an element inside the picture.
void require_window(const char* op, const PoolShape& s) {
  require(s.pad_h < s.kh && s.pad_w < s.kw, op, ": the padding ", s.pad_h, "×", s.pad_w,
          " must be smaller than the window ", s.kh, "×", s.kw);
}

// dx (+)= for each picture, what scatter(n, sums[h, w, c]) adds to sums.
template <class T, class Scatter>
void backward_pictures(Backend& backend, const PoolShape& s, T* dx, bool add, const Scatter& scatter) {
  const std::int64_t picture = s.h * s.w * s.c;
  const int parts = parts_for(backend, s.n * picture);
  Scratch<double> scratch(backend, parts * picture);
  for_parts(parts, s.n, [&](std::int64_t part, std::int64_t begin, std::int64_t end) {
    double* sums = scratch.data() + part * picture;
    for (std::int64_t n = begin; n < end; n++) {
      std::fill(sums, sums + picture, 0.0);
      scatter(n, sums);
      for (std::int64_t i = 0; i < picture; i++) put(dx[n * picture + i], sums[i], add);
    }
  });
}

}  // namespace

void ReferenceBackend::max_pool(const PoolShape& s, const Tensor& x, bool relu, Tensor& y, Tensor* argmax) {
  require_window("max_pool", s);
  require(!argmax || s.kh * s.kw <= cut_by_relu, "max_pool: a window of ", s.kh, "×", s.kw,
          " has more than 255 positions");
  dispatch(x.dtype(), "max_pool", [&]<class T> {
    using A = Accumulator<T>;
    const std::int64_t out_h = s.out_h(), out_w = s.out_w();
    const T* xp = x.data<T>();
    T* yp = y.write<T>();
    std::uint8_t* wp = argmax ? argmax->write<std::uint8_t>() : nullptr;
    const int parts = parts_for(*this, y.numel());
    Scratch<A> values(*this, parts * s.c);
    Scratch<std::int32_t> positions(*this, parts * s.c);
    for_parts(parts, s.n * out_h, [&](std::int64_t part, std::int64_t begin, std::int64_t end) {
      A* largest = values.data() + part * s.c;  // of each channel, and where it stood
      std::int32_t* position = positions.data() + part * s.c;
      for (std::int64_t row = begin; row < end; row++)
        for (std::int64_t ox = 0; ox < out_w; ox++) {
          const std::int64_t n = row / out_h, iy = row % out_h * s.stride_h - s.pad_h, ix = ox * s.stride_w - s.pad_w;
          const Range rows = inside(iy, s.kh, s.h), columns = inside(ix, s.kw, s.w);
          std::fill(largest, largest + s.c, -std::numeric_limits<A>::infinity());
          std::fill(position, position + s.c, static_cast<std::int32_t>(rows.begin * s.kw + columns.begin));
          for (std::int64_t a = rows.begin; a < rows.end; a++)
            for (std::int64_t b = columns.begin; b < columns.end; b++) {
              const T* from = xp + ((n * s.h + iy + a) * s.w + ix + b) * s.c;
              const std::int32_t here = static_cast<std::int32_t>(a * s.kw + b);
              for (std::int64_t c = 0; c < s.c; c++) {
                // The maximum with a NaN is NaN, so that failures stay visible.
                const A v = from[c];
                const bool wins = v > largest[c] || std::isnan(v);
                largest[c] = wins ? v : largest[c];
                position[c] = wins ? here : position[c];
              }
            }
          const std::int64_t to = (row * out_w + ox) * s.c;
          for (std::int64_t c = 0; c < s.c; c++) {
            const bool cut = relu && largest[c] <= 0;
            yp[to + c] = cut ? A(0) : largest[c];
            if (wp) wp[to + c] = cut ? cut_by_relu : static_cast<std::uint8_t>(position[c]);
          }
        }
    });
  });
}

void ReferenceBackend::max_pool_backward(const PoolShape& s, const Tensor& dy, const Tensor& argmax, Tensor& dx,
                                         bool add) {
  dispatch(dy.dtype(), "max_pool_backward", [&]<class T> {
    const std::int64_t out_h = s.out_h(), out_w = s.out_w();
    const T* dyp = dy.data<T>();
    const std::uint8_t* wp = argmax.data<std::uint8_t>();
    backward_pictures(*this, s, dx.write<T>(), add, [&](std::int64_t n, double* sums) {
      for (std::int64_t oy = 0; oy < out_h; oy++)
        for (std::int64_t ox = 0; ox < out_w; ox++)
          for (std::int64_t c = 0; c < s.c; c++) {
            const std::int64_t i = ((n * out_h + oy) * out_w + ox) * s.c + c, position = wp[i];
            if (position == cut_by_relu) continue;
            const std::int64_t iy = oy * s.stride_h - s.pad_h + position / s.kw;
            const std::int64_t ix = ox * s.stride_w - s.pad_w + position % s.kw;
            sums[(iy * s.w + ix) * s.c + c] += static_cast<double>(dyp[i]);
          }
    });
  });
}

void ReferenceBackend::average_pool(const PoolShape& s, const Tensor& x, Tensor& y) {
  require_window("average_pool", s);
  dispatch(x.dtype(), "average_pool", [&]<class T> {
    const std::int64_t out_h = s.out_h(), out_w = s.out_w();
    const T* xp = x.data<T>();
    T* yp = y.write<T>();
    for_parts(parts_for(*this, x.numel()), s.n * out_h, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; row++)
        for (std::int64_t ox = 0; ox < out_w; ox++) {
          const std::int64_t n = row / out_h, iy = row % out_h * s.stride_h - s.pad_h, ix = ox * s.stride_w - s.pad_w;
          const Range rows = inside(iy, s.kh, s.h), columns = inside(ix, s.kw, s.w);
          const double count = static_cast<double>((rows.end - rows.begin) * (columns.end - columns.begin));
          for (std::int64_t c = 0; c < s.c; c++) {
            double sum = 0;
            for (std::int64_t a = rows.begin; a < rows.end; a++)
              for (std::int64_t b = columns.begin; b < columns.end; b++)
                sum += static_cast<double>(xp[((n * s.h + iy + a) * s.w + ix + b) * s.c + c]);
            put(yp[(row * out_w + ox) * s.c + c], sum / count, false);
          }
        }
    });
  });
}

void ReferenceBackend::average_pool_backward(const PoolShape& s, const Tensor& dy, Tensor& dx, bool add) {
  require_window("average_pool_backward", s);
  dispatch(dy.dtype(), "average_pool_backward", [&]<class T> {
    const std::int64_t out_h = s.out_h(), out_w = s.out_w();
    const T* dyp = dy.data<T>();
    backward_pictures(*this, s, dx.write<T>(), add, [&](std::int64_t n, double* sums) {
      for (std::int64_t oy = 0; oy < out_h; oy++)
        for (std::int64_t ox = 0; ox < out_w; ox++) {
          const std::int64_t iy = oy * s.stride_h - s.pad_h, ix = ox * s.stride_w - s.pad_w;
          const Range rows = inside(iy, s.kh, s.h), columns = inside(ix, s.kw, s.w);
          const double count = static_cast<double>((rows.end - rows.begin) * (columns.end - columns.begin));
          for (std::int64_t a = rows.begin; a < rows.end; a++)
            for (std::int64_t b = columns.begin; b < columns.end; b++)
              for (std::int64_t c = 0; c < s.c; c++)
                sums[((iy + a) * s.w + ix + b) * s.c + c] +=
                    static_cast<double>(dyp[((n * out_h + oy) * out_w + ox) * s.c + c]) / count;
        }
    });
  });
}

}  // namespace tandem::reference
