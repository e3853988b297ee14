// Max and average pooling on the CPU, x[n, h, w, c] → y[n, out_h, out_w, c], vectors along c, threads along rows of
// pictures.
//
// Backward does not scatter. Where windows do not overlap, one pass over them writes all of dx: the gradient at the
// argmax and zero elsewhere. Where they overlap, every element of dx sums the gradients of its windows. dx is therefore
// written once, without being cleared first, and no two threads write the same element.

#include <limits>
#include <vector>

#include "core/cpu/kernels.h"
#include "core/cpu/rows.h"
#include "core/launch.h"

namespace tandem::cpu {
namespace {

// Calls body(whole, c, n) for the channels in vectors: whole ones, then one of the n channels that are left. room is
// the number of elements that may be read and written from the first channel on. If it is large enough, the last vector
// is whole too. It then writes into the next pixels, which the caller overwrites later.
template <class Body>
void channels(std::int64_t c_all, const Body& body, std::int64_t room = 0) {
  std::int64_t c = 0;
  for (; c < c_all && c + VL <= std::max(c_all, room); c += VL) body(std::true_type{}, c, VL);
  if (c < c_all) body(std::false_type{}, c, int(c_all - c));
}

// The part of window `o` that lies inside a picture of `size` pixels: window positions [begin, end), begin at pixel
// `first`.
struct Window {
  std::int64_t begin, end, first;
  Window(std::int64_t o, std::int64_t kernel, std::int64_t stride, std::int64_t pad, std::int64_t size)
      : begin(std::max<std::int64_t>(0, pad - o * stride)),
        end(std::min(kernel, size + pad - o * stride)),
        first(o * stride - pad + begin) {}
  std::int64_t size() const { return std::max<std::int64_t>(0, end - begin); }
};

// The windows [begin, end) that contain a pixel.
struct Windows {
  std::int64_t begin, end;
  Windows(std::int64_t pixel, std::int64_t kernel, std::int64_t stride, std::int64_t pad, std::int64_t count)
      : begin(pixel + pad < kernel ? 0 : (pixel + pad - kernel) / stride + 1),
        end(std::min(count, (pixel + pad) / stride + 1)) {}
};

int worth(int threads, const PoolShape& s) { return s.n * s.h * s.w * s.c < parallel_grain ? 1 : threads; }

// One row of windows of a max pool. kernel > 0: all windows are inside the picture and squares of this size.
template <int kernel, class T>
void max_row(const PoolShape& s, std::int64_t oh, const T* picture, bool with_relu, T* y, std::uint8_t* argmax) {
  const Window rows(oh, s.kh, s.stride_h, s.pad_h, s.h);
  for (std::int64_t ow = 0, out_w = s.out_w(); ow < out_w; ow++, y += s.c, argmax += argmax ? s.c : 0) {
    const Window columns(ow, s.kw, s.stride_w, s.pad_w, s.w);
    const T* corner = picture + (rows.first * s.w + columns.first) * s.c;
    const std::int64_t room = s.c * std::min(out_w - ow, s.w - columns.first - columns.size() + 1);
    channels(
        s.c,
        [&](auto whole, std::int64_t c, int n) {
          vf best = broadcast(-std::numeric_limits<float>::infinity());
          vi at = broadcast(std::int32_t(kernel ? 0 : rows.begin * s.kw + columns.begin));
          auto visit = [&](std::int64_t i, std::int64_t j, std::int64_t position) {
            const vf v = take<whole>(corner + (i * s.w + j) * s.c + c, n);
            const vi larger = beats(v, best);
            best = larger ? v : best;
            at = larger ? broadcast(std::int32_t(position)) : at;
          };
          if constexpr (kernel > 0) {
            for (int i = 0; i < kernel; i++)
              for (int j = 0; j < kernel; j++) visit(i, j, i * kernel + j);
          } else {
            for (std::int64_t i = 0; i < rows.size(); i++)
              for (std::int64_t j = 0; j < columns.size(); j++)
                visit(i, j, (rows.begin + i) * s.kw + columns.begin + j);
            if (rows.size() * columns.size() == 0) at = broadcast(255);
          }
          if (with_relu) {
            at = best <= 0.f ? broadcast(255) : at;
            best = relu(best);
          }
          put<whole>(y + c, n, best);
          if (argmax) put<whole>(argmax + c, n, at);
        },
        room);
  }
}

// dx for windows that tile the picture: element k of a window receives value(whole, position of dy, k, elements of the
// window, n).
template <class T, class Value>
void scatter_over_tiles(int threads, const PoolShape& shape, T* dx, bool add, const Value& shared_value) {
  parallel_ranges(worth(threads, shape), shape.n * shape.h, 1, [&](std::int64_t begin, std::int64_t end) {
    const PoolShape s = shape;  // private copies, so that the compiler knows that no store changes them
    const Value value = shared_value;
    const std::int64_t out_h = s.out_h(), out_w = s.out_w();
    for (std::int64_t row = begin; row < end; row++) {
      const std::int64_t ih = row % s.h, oh = ih / s.kh, i = ih % s.kh;
      // Elements beyond the last window receive no gradient
      const std::int64_t covered = oh < out_h ? out_w * s.kw * s.c : 0;
      T* to = dx + row * s.w * s.c;
      if (!add) std::fill(to + covered, to + s.w * s.c, T(0.f));
      if (!covered) continue;
      for (std::int64_t ow = 0, from = (row / s.h * out_h + oh) * out_w * s.c; ow < out_w; ow++, from += s.c)
        for (std::int64_t j = 0; j < s.kw; j++, to += s.c)
          channels(
              s.c,
              [&](auto whole, std::int64_t c, int n) {
                vf v = value(whole, from + c, i * s.kw + j, s.kh * s.kw, n);
                if (add) v += take<whole>(to + c, n);
                put<whole>(to + c, n, v);
              },
              add ? 0 : s.c * (out_w - ow));  // when adding, the excess would remain in the next pixels
    }
  });
}

// dx for windows of any kind: a row of pixels collects value(whole, position of dy, k, elements of the window, n) from
// the rows of windows that contain it, in a row of floats that stays in cache.
template <class T, class Value>
void collect_from_windows(int threads, const PoolShape& shape, T* dx, bool add, const Value& shared_value) {
  parallel_ranges(worth(threads, shape), shape.n * shape.h, 1, [&](std::int64_t begin, std::int64_t end) {
    const PoolShape s = shape;
    const Value value = shared_value;
    const std::int64_t out_h = s.out_h(), out_w = s.out_w(), width = s.w * s.c;
    std::vector<float> row_of_sums(width);
    float* const sums = row_of_sums.data();
    for (std::int64_t row = begin; row < end; row++) {
      const std::int64_t ih = row % s.h;
      T* to = dx + row * width;
      if (add)
        channels(width, [&](auto whole, std::int64_t c, int n) { put<whole>(sums + c, n, take<whole>(to + c, n)); });
      else
        std::fill_n(sums, width, 0.f);
      const Windows rows(ih, s.kh, s.stride_h, s.pad_h, out_h);
      for (std::int64_t oh = rows.begin; oh < rows.end; oh++) {
        const std::int64_t first = (ih + s.pad_h - oh * s.stride_h) * s.kw;
        const std::int64_t height = Window(oh, s.kh, s.stride_h, s.pad_h, s.h).size();
        for (std::int64_t ow = 0, from = (row / s.h * out_h + oh) * out_w * s.c; ow < out_w; ow++, from += s.c) {
          const Window columns(ow, s.kw, s.stride_w, s.pad_w, s.w);
          for (std::int64_t j = 0; j < columns.size(); j++)
            channels(s.c, [&](auto whole, std::int64_t c, int n) {
              float* sum = sums + (columns.first + j) * s.c + c;
              const vf v = value(whole, from + c, first + columns.begin + j, height * columns.size(), n);
              put<whole>(sum, n, take<whole>(sum, n) + v);
            });
        }
      }
      channels(width, [&](auto whole, std::int64_t c, int n) { put<whole>(to + c, n, take<whole>(sums + c, n)); });
    }
  });
}

bool tiles(const PoolShape& s) {
  return s.kh == s.stride_h && s.kw == s.stride_w && s.pad_h == 0 && s.pad_w == 0 && s.kh <= s.h && s.kw <= s.w;
}

// dx (+)= the contribution of each window to its elements.
template <class T, class Value>
void backward(int threads, const PoolShape& s, T* dx, bool add, const Value& value) {
  if (tiles(s))
    scatter_over_tiles(threads, s, dx, add, value);
  else
    collect_from_windows(threads, s, dx, add, value);
}

}  // namespace

// ---- max ------------------------------------------------------------------------------------------------------------
template <class T>
void CpuKernels<T>::max_pool(const PoolShape& shape, In<T> x, bool relu, Out<T> y, Out<std::uint8_t> argmax) {
  const std::int64_t out_h = shape.out_h(), row = shape.out_w() * shape.c;
  const bool pairs = tiles(shape) && shape.kh == 2 && shape.kw == 2;
  parallel_ranges(worth(threads_, shape), shape.n * out_h, 1, [&](std::int64_t begin, std::int64_t end) {
    const PoolShape s = shape;
    for (std::int64_t i = begin; i < end; i++) {
      const T* picture = x + i / out_h * s.h * s.w * s.c;
      std::uint8_t* w = argmax ? argmax + i * row : nullptr;
      if (pairs)
        max_row<2>(s, i % out_h, picture, relu, y + i * row, w);
      else
        max_row<0>(s, i % out_h, picture, relu, y + i * row, w);
    }
  });
}

template <class T>
void CpuKernels<T>::max_pool_backward(const PoolShape& s, In<T> dy, In<std::uint8_t> argmax, Out<T> dx, bool add) {
  backward(threads_, s, dx.data, add,
           [dy = dy.data, argmax = argmax.data](auto whole, std::int64_t at, std::int64_t k, std::int64_t, int n) {
             const vf d = take<whole>(dy + at, n);
             return take<whole>(argmax + at, n) == std::int32_t(k) ? d : vf{};
           });
}

// ---- average --------------------------------------------------------------------------------------------------------
template <class T>
void CpuKernels<T>::average_pool(const PoolShape& shape, In<T> x, Out<T> y) {
  const std::int64_t out_h = shape.out_h(), out_w = shape.out_w();
  parallel_ranges(worth(threads_, shape), shape.n * out_h, 1, [&](std::int64_t begin, std::int64_t end) {
    const PoolShape s = shape;
    for (std::int64_t item = begin; item < end; item++) {
      const T* picture = x + item / out_h * s.h * s.w * s.c;
      const Window rows(item % out_h, s.kh, s.stride_h, s.pad_h, s.h);
      for (std::int64_t ow = 0; ow < out_w; ow++) {
        const Window columns(ow, s.kw, s.stride_w, s.pad_w, s.w);
        const T* corner = picture + (rows.first * s.w + columns.first) * s.c;
        const std::int64_t count = rows.size() * columns.size();
        const float share = count ? 1 / float(count) : 0;
        channels(s.c, [&](auto whole, std::int64_t c, int n) {
          vf sum{};
          for (std::int64_t i = 0; i < rows.size(); i++) {  // by rows: a sum over a large window loses fewer digits
            vf line{};
            for (std::int64_t j = 0; j < columns.size(); j++) line += take<whole>(corner + (i * s.w + j) * s.c + c, n);
            sum += line;
          }
          put<whole>(y + (item * out_w + ow) * s.c + c, n, sum * share);
        });
      }
    }
  });
}

template <class T>
void CpuKernels<T>::average_pool_backward(const PoolShape& s, In<T> dy, Out<T> dx, bool add) {
  backward(threads_, s, dx.data, add,
           [dy = dy.data](auto whole, std::int64_t at, std::int64_t, std::int64_t count, int n) {
             return take<whole>(dy + at, n) * (1 / float(count));
           });
}

template class CpuKernels<float>;  // the members that this file defines
template class CpuKernels<bf16>;

}  // namespace tandem::cpu
