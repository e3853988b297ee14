// Direct convolution for few input channels.
//
// In NHWC one row of a filter is kw·c_in neighbouring elements ("taps"). It is multiplied with as many neighbouring
// elements of the picture. The window of the next pixel begins stride·c_in elements later, so nothing has to be
// gathered: one copy adds a border of zeros to the picture (a 32×32×3 picture takes 13 KB and stays in the L1 cache).
// Each pass keeps its sums in registers:
//   forward          Lanes: output channels. Registers: a run of pixels. Each tap is broadcast from the picture.
//   filter gradient  Lanes: output channels. Registers: a group of taps. Sums over all pixels of a picture.
//   data gradient    Lanes: the taps of a filter row (a 5×5 filter on 6 channels uses 30 of 32 lanes; with channels as
//                    lanes it would use 6 of 16). Registers: rows × pixels. Sums over output channels; the result is
//                    added to the picture, since windows overlap.
#include "core/cpu/direct.h"

#include <algorithm>
#include <cstring>

#include "core/cpu/simd.h"
#include "core/error.h"

namespace tandem::cpu::direct {
namespace {

int rounded(int n) { return (n + VL - 1) / VL * VL; }

// The sizes that all passes use. The bordered picture is [height][pitch] floats, and some more for whole vectors.
struct Geometry {
  int n, h, w, c_in, c_out, kh, kw, out_h, out_w, stride_h, step, pad_h, taps, height, pitch, lanes_out;
  explicit Geometry(const ConvShape& s)
      : n(int(s.n)),
        h(int(s.h)),
        w(int(s.w)),
        c_in(int(s.c_in)),
        c_out(int(s.c_out)),
        kh(int(s.kh)),
        kw(int(s.kw)),
        out_h(int(s.out_h())),
        out_w(int(s.out_w())),
        stride_h(int(s.stride_h)),
        step(int(s.stride_w * s.c_in)),
        pad_h(int(s.pad_h)),
        taps(int(s.kw * s.c_in)),
        height(int(s.h + 2 * s.pad_h)),
        pitch(int((s.w + 2 * s.pad_w) * s.c_in)),
        lanes_out(rounded(int(s.c_out))) {}
  int left() const { return (pitch - w * c_in) / 2; }
  std::size_t bordered() const { return std::size_t(height) * pitch + 64 + VL; }
  std::size_t picture() const { return std::size_t(h) * w * c_in; }
  std::size_t pixels() const { return std::size_t(out_h) * out_w; }
};

// Copies the picture into its border, which is already zero.
template <class T>
void fill(const Geometry& g, const T* x, float* bordered) {
  for (int i = 0; i < g.h; i++)
    convert(1, x + std::size_t(i) * g.w * g.c_in, bordered + std::size_t(i + g.pad_h) * g.pitch + g.left(),
            g.w * g.c_in);
}

// w[o][kh][tap] → [kh][tap][o], output channels padded with zeros to whole vectors.
void by_output(const Geometry& g, const float* w, float* to) {
  std::memset(to, 0, sizeof(float) * g.kh * g.taps * g.lanes_out);
  for (int o = 0; o < g.c_out; o++)
    for (int t = 0; t < g.kh * g.taps; t++) to[t * g.lanes_out + o] = w[o * g.kh * g.taps + t];
}

// ---- forward --------------------------------------------------------------------------------------------------------
// P neighbouring pixels × NV vectors of output channels. STEP: elements from one window to the next, 0 when not a
// constant.
template <int P, int NV, int STEP, class O>
void pixels_forward(const Geometry& g, const float* x, const float* w, O* y, const float* bias, bool cut) {
  const int step = STEP ? STEP : g.step;
  vf sum[P][NV];
#pragma GCC unroll 16
  for (int p = 0; p < P; p++)
#pragma GCC unroll 2
    for (int n = 0; n < NV; n++) sum[p][n] = load(bias + n * VL);
  for (int i = 0; i < g.kh; i++, x += g.pitch) {
#pragma GCC unroll 1
    for (int t = 0; t < g.taps; t++, w += g.lanes_out) {
      vf v[NV];
#pragma GCC unroll 2
      for (int n = 0; n < NV; n++) v[n] = load(w + n * VL);
#pragma GCC unroll 16
      for (int p = 0; p < P; p++) {
        vf a = broadcast(x[p * step + t]);
#pragma GCC unroll 2
        for (int n = 0; n < NV; n++) sum[p][n] += a * v[n];
      }
    }
  }
  // The order matters: if channels are not a whole number of vectors, the next pixel overwrites the excess of this one.
#pragma GCC unroll 16
  for (int p = 0; p < P; p++)
#pragma GCC unroll 2
    for (int n = 0; n < NV; n++) store(y + p * g.c_out + n * VL, cut ? relu(sum[p][n]) : sum[p][n]);
}

template <class O>
using PixelKernel = void (*)(const Geometry&, const float*, const float*, O*, const float*, bool);

template <class O, int P, int NV>
PixelKernel<O> with_step(int step) {
  return step == 1   ? pixels_forward<P, NV, 1, O>
         : step == 3 ? pixels_forward<P, NV, 3, O>
         : step == 6 ? pixels_forward<P, NV, 6, O>
                     : pixels_forward<P, NV, 0, O>;
}

// Chooses the number of pixels per run for which a row costs least. The last run may begin early and repeat some.
template <class O, int NV>
PixelKernel<O> pixel_kernel(const Geometry& g, int& run) {
  constexpr int most = (registers - 2 - NV) / NV;
  int best = 1;
  for (int p : {4, 6, 10, 11, 14})
    if (p <= most && p <= g.out_w && (g.out_w + p - 1) / p * (p + 2) <= (g.out_w + best - 1) / best * (best + 2))
      best = p;
  run = best;
  switch (best) {
    case 4: return with_step<O, 4, NV>(g.step);
    case 6: return with_step<O, 6, NV>(g.step);
    case 10: return with_step<O, 10, NV>(g.step);
    case 11: return with_step<O, 11, NV>(g.step);
    case 14: return with_step<O, 14, NV>(g.step);
    default: return with_step<O, 1, NV>(g.step);
  }
}

template <int NV, class O>
void row_forward(const Geometry& g, PixelKernel<O> kernel, int run, const float* x, const float* w, O* y,
                 const float* bias, bool relu) {
  for (int p = 0; p < g.out_w; p += run) {
    const int from = std::min(p, g.out_w - run);
    for (int o = 0; o < g.lanes_out; o += NV * VL)
      kernel(g, x + from * g.step, w + o, y + std::int64_t(from) * g.c_out + o, bias + o, relu);
  }
}

template <int NV, class T>
void forward_with(const Geometry& g, const T* x, const float* w, T* y, const Epilogue& epilogue,
                  CachingAllocator& allocator, int threads) {
  // If not whole, rows are first computed in f32, in memory with room for the last vector's excess
  const bool whole = g.c_out % VL == 0;
  const std::size_t weights = std::size_t(g.kh) * g.taps * g.lanes_out, row = std::size_t(g.out_w) * g.c_out + 2 * VL;
  Scratch memory(allocator, 4 * (weights + g.lanes_out + threads * (g.bordered() + row + 32)) + 256);
  float* filters = memory.carve<float>(weights);
  float* bias = memory.carve<float>(g.lanes_out);
  const std::size_t own = (g.bordered() + row + 15) / 16 * 16;
  float* private_part = memory.carve<float>(threads * own);
  by_output(g, w, filters);
  std::memset(bias, 0, 4 * g.lanes_out);
  if (epilogue.bias) std::memcpy(bias, epilogue.bias, 4 * g.c_out);
  std::memset(private_part, 0, 4 * threads * own);
  int run = 1, narrow_run = 1;
  const auto kernel = pixel_kernel<T, NV>(g, run);
  const auto narrow_kernel = pixel_kernel<float, 1>(g, narrow_run);
  dealt_out(threads, g.n, [&](int picture, int lane) {
    float *bordered = private_part + lane * own, *collected = bordered + g.bordered();
    fill(g, x + picture * g.picture(), bordered);
    for (int i = 0; i < g.out_h; i++) {
      const float* window = bordered + std::size_t(i) * g.stride_h * g.pitch;
      T* to = y + (picture * g.pixels() + std::size_t(i) * g.out_w) * g.c_out;
      if (whole) {
        row_forward<NV, T>(g, kernel, run, window, filters, to, bias, epilogue.relu);
      } else {
        row_forward<1, float>(g, narrow_kernel, narrow_run, window, filters, collected, bias, epilogue.relu);
        convert(1, collected, to, g.out_w * g.c_out);
      }
    }
  });
}

// ---- filter gradient ------------------------------------------------------------------------------------------------
// Adds Σ_pixels x[pixel + tap]·dy[pixel] to sums[kh][tap][o], for ROWS filter rows × TAPS taps × NV vectors of
// channels.
template <int ROWS, int TAPS, int NV, class D>
void taps_gradient(const Geometry& g, const float* x, const D* dy, int dy_stride, float* sums) {
  vf sum[ROWS][TAPS][NV];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 32
    for (int t = 0; t < TAPS; t++)
#pragma GCC unroll 2
      for (int n = 0; n < NV; n++) sum[r][t][n] = load(sums + (r * g.taps + t) * g.lanes_out + n * VL);
  for (int i = 0; i < g.out_h; i++) {
    const float* window = x + std::size_t(i) * g.stride_h * g.pitch;
#pragma GCC unroll 1
    for (int p = 0; p < g.out_w; p++, window += g.step, dy += dy_stride) {
      vf v[NV];
#pragma GCC unroll 2
      for (int n = 0; n < NV; n++) v[n] = load(dy + n * VL);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 32
        for (int t = 0; t < TAPS; t++) {
          vf a = broadcast(window[r * g.pitch + t]);
#pragma GCC unroll 2
          for (int n = 0; n < NV; n++) sum[r][t][n] += a * v[n];
        }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 32
    for (int t = 0; t < TAPS; t++)
#pragma GCC unroll 2
      for (int n = 0; n < NV; n++) store(sums + (r * g.taps + t) * g.lanes_out + n * VL, sum[r][t][n]);
}

template <class D>
struct TapKernel {
  int rows, taps, vectors;
  void (*run)(const Geometry&, const float*, const D*, int, float*);
};

// The first kernel that divides the filter and fits into the registers; the last one always does.
template <class D>
TapKernel<D> tap_kernel(const Geometry& g) {
  static constexpr TapKernel<D> kernels[] = {
      {5, 5, 1, taps_gradient<5, 5, 1, D>},   {3, 3, 2, taps_gradient<3, 3, 2, D>},
      {3, 9, 1, taps_gradient<3, 9, 1, D>},   {1, 30, 1, taps_gradient<1, 30, 1, D>},
      {1, 21, 1, taps_gradient<1, 21, 1, D>}, {1, 10, 1, taps_gradient<1, 10, 1, D>},
      {3, 3, 1, taps_gradient<3, 3, 1, D>},   {1, 9, 1, taps_gradient<1, 9, 1, D>},
      {1, 7, 1, taps_gradient<1, 7, 1, D>},   {1, 8, 1, taps_gradient<1, 8, 1, D>},
      {1, 5, 1, taps_gradient<1, 5, 1, D>},   {1, 3, 1, taps_gradient<1, 3, 1, D>}};
  for (const auto& k : kernels)
    if (g.kh % k.rows == 0 && g.taps % k.taps == 0 && g.lanes_out % (k.vectors * VL) == 0 &&
        k.rows * k.taps * k.vectors + k.vectors < registers)
      return k;
  return {1, 1, 1, taps_gradient<1, 1, 1, D>};
}

template <class D>
void picture_gradient(const Geometry& g, const TapKernel<D>& k, const float* x, const D* dy, int dy_stride,
                      float* sums) {
  for (int o = 0; o < g.lanes_out; o += k.vectors * VL)
    for (int r = 0; r < g.kh; r += k.rows)
      for (int t = 0; t < g.taps; t += k.taps)
        k.run(g, x + r * g.pitch + t, dy + o, dy_stride, sums + (r * g.taps + t) * g.lanes_out + o);
}

// ---- data gradient --------------------------------------------------------------------------------------------------
// Adds dy[pixel]·w to the windows of P pixels. The pixels are `distance` apart, so that their windows do not overlap. A
// window has ROWS filter rows of NV vectors. w is [o][row][NV·VL], with `w_stride` floats per output channel.
template <int P, int ROWS, int NV>
void windows_gradient(const Geometry& g, const float* dy, int distance, const float* w, int w_stride, float* x) {
  vf sum[P][ROWS][NV] = {};
#pragma GCC unroll 1
  for (int o = 0; o < g.c_out; o++, w += w_stride) {
    vf a[P];
#pragma GCC unroll 2
    for (int p = 0; p < P; p++) a[p] = broadcast(dy[p * distance * g.lanes_out + o]);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int n = 0; n < NV; n++) {
        vf v = load(w + (r * NV + n) * VL);
#pragma GCC unroll 2
        for (int p = 0; p < P; p++) sum[p][r][n] += a[p] * v;
      }
  }
#pragma GCC unroll 2
  for (int p = 0; p < P; p++)
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int n = 0; n < NV; n++) {
        float* to = x + std::size_t(p) * distance * g.step + r * g.pitch + n * VL;
        store(to, load(to) + sum[p][r][n]);
      }
}

constexpr bool two_fit(int rows, int vectors) { return 2 * rows * vectors + 3 <= registers; }
using WindowKernel = void (*)(const Geometry&, const float*, int, const float*, int, float*);
template <int ROWS, int NV>
WindowKernel window_kernel(bool two) {
  constexpr int most = two_fit(ROWS, NV) ? 2 : 1;
  return two ? windows_gradient<most, ROWS, NV> : windows_gradient<1, ROWS, NV>;
}
template <int ROWS>
WindowKernel window_kernel(int vectors, bool two) {
  switch (vectors) {
    case 1: return window_kernel<ROWS, 1>(two);
    case 2: return window_kernel<ROWS, 2>(two);
    case 3: return window_kernel<ROWS, 3>(two);
    default: return window_kernel<ROWS, 4>(two);
  }
}

template <class T>
void backward_filter(const ConvShape& s, const T* x, const T* dy, float* dw, bool add, CachingAllocator& allocator,
                     int threads) {
  const Geometry g(s);
  threads = std::min(threads, g.n);
  // If there are fewer channels than lanes, the other lanes read the next pixel, and their sums are dropped. dy is
  // copied, so that memory after the last pixel can be read.
  const bool whole = g.c_out % VL == 0;
  const std::size_t sums = std::size_t(g.kh) * g.taps * g.lanes_out, copied = whole ? 0 : g.pixels() * g.c_out + VL;
  const std::size_t own = (sums + copied + g.bordered() + 15) / 16 * 16;
  Scratch memory(allocator, 4 * threads * own);
  float* private_part = memory.carve<float>(threads * own);
  const auto kernel = tap_kernel<T>(g);
  const auto copy_kernel = tap_kernel<float>(g);
  in_parts(threads, [&](int lane) {
    float *mine = private_part + lane * own, *wide = mine + sums, *bordered = wide + copied;
    std::memset(mine, 0, 4 * own);
    const Share share(g.n, threads, lane);
    for (int picture = share.begin; picture < share.end; picture++) {
      fill(g, x + picture * g.picture(), bordered);
      const T* gradient = dy + picture * g.pixels() * g.c_out;
      if (whole) {
        picture_gradient(g, kernel, bordered, gradient, g.c_out, mine);
      } else {
        convert(1, gradient, wide, std::int64_t(g.pixels()) * g.c_out);
        picture_gradient<float>(g, copy_kernel, bordered, wide, g.c_out, mine);
      }
    }
  });
  for (int o = 0; o < g.c_out; o++)
    for (int t = 0; t < g.kh * g.taps; t++) {
      float sum = add ? dw[o * g.kh * g.taps + t] : 0.f;
      for (int lane = 0; lane < threads; lane++) sum += private_part[lane * own + std::size_t(t) * g.lanes_out + o];
      dw[o * g.kh * g.taps + t] = sum;
    }
}

template <class T>
void backward_data(const ConvShape& s, const T* dy, const float* w, T* dx, bool add, CachingAllocator& allocator,
                   int threads) {
  const Geometry g(s);
  const int vectors = rounded(g.taps) / VL, row = vectors * VL, w_stride = g.kh * row;
  const int rows = g.kh % 5 == 0 ? 5 : g.kh % 3 == 0 ? 3 : 1;
  const auto kernel = [&](bool two) {
    return rows == 5   ? window_kernel<5>(vectors, two)
           : rows == 3 ? window_kernel<3>(vectors, two)
                       : window_kernel<1>(vectors, two);
  };
  const WindowKernel one = kernel(false), two = kernel(true);
  const std::size_t weights = std::size_t(g.c_out) * w_stride, gradient = g.pixels() * g.lanes_out;
  const std::size_t own = (g.bordered() + gradient + 15) / 16 * 16;
  Scratch memory(allocator, 4 * (weights + threads * own) + 64);
  float* filters = memory.carve<float>(weights);  // [o][kh][taps, padded with zeros]
  float* private_part = memory.carve<float>(threads * own);
  std::memset(filters, 0, 4 * weights);
  for (int o = 0; o < g.c_out; o++)
    for (int r = 0; r < g.kh; r++)
      std::memcpy(filters + o * w_stride + r * row, w + (o * g.kh + r) * g.taps, 4 * g.taps);
  const int half = two_fit(rows, vectors) ? g.out_w / 2 : 0;
  dealt_out(threads, g.n, [&](int picture, int lane) {
    float *bordered = private_part + lane * own, *wide = bordered + g.bordered();
    std::memset(bordered, 0, 4 * g.bordered());
    const T* from = dy + picture * g.pixels() * g.c_out;
    if (g.c_out == g.lanes_out)
      convert(1, from, wide, std::int64_t(gradient));
    else
      for (std::size_t p = 0; p < g.pixels(); p++) convert(1, from + p * g.c_out, wide + p * g.lanes_out, g.c_out);
    for (int i = 0; i < g.out_h; i++)
      for (int r = 0; r < g.kh; r += rows) {
        const float* pixel = wide + std::size_t(i) * g.out_w * g.lanes_out;
        float* window = bordered + (std::size_t(i) * g.stride_h + r) * g.pitch;
        int p = 0;
        for (; p < half; p++) two(g, pixel + p * g.lanes_out, half, filters + r * row, w_stride, window + p * g.step);
        for (p = 2 * half; p < g.out_w; p++)
          one(g, pixel + p * g.lanes_out, 0, filters + r * row, w_stride, window + p * g.step);
      }
    T* to = dx + picture * g.picture();
    for (int i = 0; i < g.h; i++)
      convert(1, bordered + std::size_t(i + g.pad_h) * g.pitch + g.left(), to + std::size_t(i) * g.w * g.c_in,
              g.w * g.c_in, add);
  });
}

}  // namespace

bool applicable(const ConvShape& s) {
  return s.groups == 1 && s.dilation_h == 1 && s.dilation_w == 1 && s.c_in <= 8 && s.c_out <= 512 &&
         (s.c_out % VL == 0 || s.c_out < VL) && s.kw * s.c_in <= 4 * VL && s.kh <= 16 && s.out_h() > 0 && s.out_w() > 0;
}

template <class T>
void run(const ConvCall<T>& c, CachingAllocator& allocator, int threads) {
  if (c.pass == Pass::backward_data) return backward_data(c.s, c.y, c.w, c.x, c.add, allocator, threads);
  if (c.pass == Pass::backward_filter) return backward_filter(c.s, c.x, c.y, c.w, c.add, allocator, threads);
  const Geometry g(c.s);
  if (g.lanes_out % (2 * VL) == 0)
    forward_with<2, T>(g, c.x, c.w, c.y, c.epilogue, allocator, threads);
  else
    forward_with<1, T>(g, c.x, c.w, c.y, c.epilogue, allocator, threads);
}

template void run(const ConvCall<float>&, CachingAllocator&, int);
template void run(const ConvCall<bf16>&, CachingAllocator&, int);

}  // namespace tandem::cpu::direct
