// Convolution and its two gradients, x[n, h, w, c_in], w[c_out, kh, kw, c_in/groups], y[n, out_h, out_w, c_out]:
//
//   y[n, oy, ox, o]  = Σ_{a,b,c} x[n, oy·stride − pad + a·dilation, ox·stride − pad + b·dilation, c]·w[o, a, b, c]
//   dx[n, iy, ix, c] = Σ_{o,a,b} dy[n, (iy + pad − a·dilation)/stride, …, o]·w[o, a, b, c]   where that divides
//   dw[o, a, b, c]   = Σ_{n,oy,ox} dy[n, oy, ox, o]·x[n, oy·stride − pad + a·dilation, …, c]
//
// First the seven loops. Then the same as matrix products ("im2col": Chellapilla, Puri and Simard, 2006): each pixel's
// patch becomes a row of a matrix, made in chunks of rows that fit the cache and never for a whole batch. Pixels are
// counted through the batch. The data gradient gathers patches of dy, so that threads never write the same dx.
#include "core/reference/backend.h"
#include "core/reference/product.h"

namespace tandem::reference {

namespace {

// The output row that tap a of the filter connects with input row iy, or −1.
std::int64_t output_position(std::int64_t iy, std::int64_t a, std::int64_t pad, std::int64_t dilation,
                             std::int64_t stride, std::int64_t outputs) {
  const std::int64_t t = iy + pad - a * dilation;
  return t >= 0 && t % stride == 0 && t / stride < outputs ? t / stride : -1;
}

// ---- seven loops ----------------------------------------------------------------------------------------------------

template <class T, class P>
void plain_forward(Backend& backend, const ConvShape& s, const T* x, const P* w, const P* bias, bool relu, T* y) {
  const std::int64_t out_h = s.out_h(), out_w = s.out_w(), in = s.c_in / s.groups, out = s.c_out / s.groups;
  for_parts(parts_for(backend, s.y_numel()), s.n * out_h, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; row++)
      for (std::int64_t ox = 0; ox < out_w; ox++)
        for (std::int64_t o = 0; o < s.c_out; o++) {
          const std::int64_t n = row / out_h, oy = row % out_h, group = o / out;
          double sum = bias ? static_cast<double>(bias[o]) : 0.0;
          for (std::int64_t a = 0; a < s.kh; a++)
            for (std::int64_t b = 0; b < s.kw; b++) {
              const std::int64_t iy = oy * s.stride_h - s.pad_h + a * s.dilation_h;
              const std::int64_t ix = ox * s.stride_w - s.pad_w + b * s.dilation_w;
              if (iy < 0 || iy >= s.h || ix < 0 || ix >= s.w) continue;
              const T* from = x + ((n * s.h + iy) * s.w + ix) * s.c_in + group * in;
              const P* filter = w + ((o * s.kh + a) * s.kw + b) * in;
              for (std::int64_t c = 0; c < in; c++)
                sum += static_cast<double>(from[c]) * static_cast<double>(filter[c]);
            }
          put(y[(row * out_w + ox) * s.c_out + o], relu ? reference::relu(sum) : sum, false);
        }
  });
}

template <class T, class P>
void plain_backward_data(Backend& backend, const ConvShape& s, const T* dy, const P* w, T* dx, bool add) {
  const std::int64_t out_h = s.out_h(), out_w = s.out_w(), in = s.c_in / s.groups, out = s.c_out / s.groups;
  for_parts(parts_for(backend, s.x_numel()), s.n * s.h, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; row++)
      for (std::int64_t ix = 0; ix < s.w; ix++)
        for (std::int64_t ci = 0; ci < s.c_in; ci++) {
          const std::int64_t n = row / s.h, iy = row % s.h, group = ci / in, c = ci % in;
          double sum = 0;
          for (std::int64_t a = 0; a < s.kh; a++)
            for (std::int64_t b = 0; b < s.kw; b++) {
              const std::int64_t oy = output_position(iy, a, s.pad_h, s.dilation_h, s.stride_h, out_h);
              const std::int64_t ox = output_position(ix, b, s.pad_w, s.dilation_w, s.stride_w, out_w);
              if (oy < 0 || ox < 0) continue;
              const T* from = dy + ((n * out_h + oy) * out_w + ox) * s.c_out;
              for (std::int64_t o = group * out; o < (group + 1) * out; o++)
                sum += static_cast<double>(from[o]) * static_cast<double>(w[((o * s.kh + a) * s.kw + b) * in + c]);
            }
          put(dx[(row * s.w + ix) * s.c_in + ci], sum, add);
        }
  });
}

template <class T, class P>
void plain_backward_filter(Backend& backend, const ConvShape& s, const T* x, const T* dy, P* dw, bool add) {
  const std::int64_t out_h = s.out_h(), out_w = s.out_w(), in = s.c_in / s.groups, out = s.c_out / s.groups;
  for_parts(parts_for(backend, s.y_numel()), s.c_out, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
    for (std::int64_t o = begin; o < end; o++)
      for (std::int64_t a = 0; a < s.kh; a++)
        for (std::int64_t b = 0; b < s.kw; b++)
          for (std::int64_t c = 0; c < in; c++) {
            const std::int64_t ci = o / out * in + c;
            double sum = 0;
            for (std::int64_t n = 0; n < s.n; n++)
              for (std::int64_t oy = 0; oy < out_h; oy++)
                for (std::int64_t ox = 0; ox < out_w; ox++) {
                  const std::int64_t iy = oy * s.stride_h - s.pad_h + a * s.dilation_h;
                  const std::int64_t ix = ox * s.stride_w - s.pad_w + b * s.dilation_w;
                  if (iy < 0 || iy >= s.h || ix < 0 || ix >= s.w) continue;
                  sum += static_cast<double>(dy[((n * out_h + oy) * out_w + ox) * s.c_out + o]) *
                         static_cast<double>(x[((n * s.h + iy) * s.w + ix) * s.c_in + ci]);
                }
            put(dw[((o * s.kh + a) * s.kw + b) * in + c], sum, add);
          }
  });
}

// ---- patches and matrix products ------------------------------------------------------------------------------------

// One row of a patch matrix: `channels` floats, or zeros where there is no such pixel.
template <class T>
void copy_channels(const T* from, std::int64_t channels, float* to) {
  if (from)
    for (std::int64_t c = 0; c < channels; c++) to[c] = from[c];
  else
    std::fill(to, to + channels, 0.0f);
}

// patches[last − first, kh, kw, c_in/groups]: what the filters of `group` see under output pixels [first, last).
template <class T>
void input_patches(const ConvShape& s, const T* x, std::int64_t group, std::int64_t first, std::int64_t last,
                   float* patches) {
  const std::int64_t out_h = s.out_h(), out_w = s.out_w(), in = s.c_in / s.groups;
  for (std::int64_t pixel = first; pixel < last; pixel++) {
    const std::int64_t n = pixel / (out_h * out_w), oy = pixel / out_w % out_h, ox = pixel % out_w;
    for (std::int64_t a = 0; a < s.kh; a++)
      for (std::int64_t b = 0; b < s.kw; b++, patches += in) {
        const std::int64_t iy = oy * s.stride_h - s.pad_h + a * s.dilation_h;
        const std::int64_t ix = ox * s.stride_w - s.pad_w + b * s.dilation_w;
        const bool inside = iy >= 0 && iy < s.h && ix >= 0 && ix < s.w;
        copy_channels(inside ? x + ((n * s.h + iy) * s.w + ix) * s.c_in + group * in : nullptr, in, patches);
      }
  }
}

// patches[last − first, kh, kw, c_out/groups]: the output pixels that input pixels [first, last) reached.
template <class T>
void output_patches(const ConvShape& s, const T* dy, std::int64_t group, std::int64_t first, std::int64_t last,
                    float* patches) {
  const std::int64_t out_h = s.out_h(), out_w = s.out_w(), out = s.c_out / s.groups;
  for (std::int64_t pixel = first; pixel < last; pixel++) {
    const std::int64_t n = pixel / (s.h * s.w), iy = pixel / s.w % s.h, ix = pixel % s.w;
    for (std::int64_t a = 0; a < s.kh; a++) {
      const std::int64_t oy = output_position(iy, a, s.pad_h, s.dilation_h, s.stride_h, out_h);
      for (std::int64_t b = 0; b < s.kw; b++, patches += out) {
        const std::int64_t ox = output_position(ix, b, s.pad_w, s.dilation_w, s.stride_w, out_w);
        const bool inside = oy >= 0 && ox >= 0;
        copy_channels(inside ? dy + ((n * out_h + oy) * out_w + ox) * s.c_out + group * out : nullptr, out, patches);
      }
    }
  }
}

// Rows of a patch matrix made at a time: half a megabyte with their products, but enough to repay packing the filters.
std::int64_t chunk_rows(std::int64_t row_numel) { return std::max<std::int64_t>(96, 131072 / row_numel); }

// y[pixels, out] = patches[pixels, taps]·w[out, taps]ᵀ in every group
template <class T>
void blocked_forward(Backend& backend, const ConvShape& s, const T* x, const float* w, const float* bias, bool relu,
                     T* y) {
  const std::int64_t out = s.c_out / s.groups, taps = s.kh * s.kw * (s.c_in / s.groups);
  const std::int64_t pixels = s.n * s.out_h() * s.out_w(), rows = std::min(pixels, chunk_rows(taps + out));
  const int parts = parts_for(backend, pixels * out * taps / 16);
  const std::int64_t lent = rows * (taps + out) + product_scratch;  // floats for each thread
  Scratch<float> scratch(backend, parts * lent);
  for_parts(parts, pixels, [&](std::int64_t part, std::int64_t begin, std::int64_t end) {
    float *packed = scratch.data() + part * lent, *patches = packed + product_scratch, *sums = patches + rows * taps;
    for (std::int64_t first = begin; first < end; first += rows) {
      const std::int64_t last = std::min(end, first + rows);
      for (std::int64_t group = 0; group < s.groups; group++) {
        input_patches(s, x, group, first, last, patches);
        std::fill(sums, sums + (last - first) * out, 0.0f);
        add_product(last - first, out, taps, {patches, taps, 1}, {w + group * out * taps, 1, taps}, sums, out, packed);
        for (std::int64_t p = first; p < last; p++)
          for (std::int64_t o = 0; o < out; o++) {
            const float v = sums[(p - first) * out + o] + (bias ? bias[group * out + o] : 0.0f);
            y[p * s.c_out + group * out + o] = relu && v < 0 ? 0.0f : v;
          }
      }
    }
  });
}

// dx[pixels, in] = patches of dy[pixels, kh·kw·out]·wᵗ[kh·kw·out, in] in every group; wᵗ is w with its first axis moved
template <class T>
void blocked_backward_data(Backend& backend, const ConvShape& s, const T* dy, const float* w, T* dx, bool add) {
  const std::int64_t in = s.c_in / s.groups, out = s.c_out / s.groups, window = s.kh * s.kw, taps = window * out;
  Scratch<float> moved(backend, s.w_numel());  // [groups, kh·kw, out, in]
  for (std::int64_t o = 0; o < s.c_out; o++)
    for (std::int64_t t = 0; t < window; t++)
      std::copy_n(w + (o * window + t) * in, in, moved.data() + ((o / out * window + t) * out + o % out) * in);

  const std::int64_t pixels = s.n * s.h * s.w, rows = std::min(pixels, chunk_rows(taps + in));
  const int parts = parts_for(backend, pixels * in * taps / 16);
  const std::int64_t lent = rows * (taps + in) + product_scratch;
  Scratch<float> scratch(backend, parts * lent);
  for_parts(parts, pixels, [&](std::int64_t part, std::int64_t begin, std::int64_t end) {
    float *packed = scratch.data() + part * lent, *patches = packed + product_scratch, *sums = patches + rows * taps;
    for (std::int64_t first = begin; first < end; first += rows) {
      const std::int64_t last = std::min(end, first + rows);
      for (std::int64_t group = 0; group < s.groups; group++) {
        output_patches(s, dy, group, first, last, patches);
        std::fill(sums, sums + (last - first) * in, 0.0f);
        add_product(last - first, in, taps, {patches, taps, 1}, {moved.data() + group * taps * in, in, 1}, sums, in,
                    packed);
        for (std::int64_t p = first; p < last; p++)
          for (std::int64_t c = 0; c < in; c++) {
            T& to = dx[p * s.c_in + group * in + c];
            const float v = sums[(p - first) * in + c];
            to = add ? static_cast<float>(to) + v : v;
          }
      }
    }
  });
}

// dw[out, taps] = dy[pixels, out]ᵀ·patches[pixels, taps] in every group; each part sums its own, then they are added
template <class T>
void blocked_backward_filter(Backend& backend, const ConvShape& s, const T* x, const T* dy, float* dw, bool add) {
  const std::int64_t out = s.c_out / s.groups, taps = s.kh * s.kw * (s.c_in / s.groups), filters = s.w_numel();
  const std::int64_t pixels = s.n * s.out_h() * s.out_w(), rows = std::min(pixels, chunk_rows(taps + out));
  const int parts = parts_for(backend, pixels * out * taps / 16);
  const std::int64_t lent = rows * (taps + out) + product_scratch;
  Scratch<float> scratch(backend, parts * lent), partial(backend, parts * filters);
  std::fill(partial.data(), partial.data() + parts * filters, 0.0f);
  for_parts(parts, pixels, [&](std::int64_t part, std::int64_t begin, std::int64_t end) {
    float *packed = scratch.data() + part * lent, *patches = packed + product_scratch, *dy_rows = patches + rows * taps;
    for (std::int64_t first = begin; first < end; first += rows) {
      const std::int64_t last = std::min(end, first + rows);
      for (std::int64_t group = 0; group < s.groups; group++) {
        input_patches(s, x, group, first, last, patches);
        for (std::int64_t p = first; p < last; p++)
          copy_channels(dy + p * s.c_out + group * out, out, dy_rows + (p - first) * out);
        add_product(out, taps, last - first, {dy_rows, 1, out}, {patches, taps, 1},
                    partial.data() + part * filters + group * out * taps, taps, packed);
      }
    }
  });
  for (std::int64_t i = 0; i < filters; i++) {
    double sum = 0;
    for (int part = 0; part < parts; part++) sum += partial.data()[part * filters + i];
    put(dw[i], sum, add);
  }
}

}  // namespace

void ReferenceBackend::conv2d(const ConvShape& s, const Tensor& x, const Tensor& w, const Tensor* bias, bool relu,
                              Tensor& y) {
  dispatch(x.dtype(), "conv2d", [&]<class T> {
    using P = Parameter<T>;
    const P* b = bias ? bias->data<P>() : nullptr;
    if constexpr (!std::is_same_v<T, double>)
      if (blocked(x.dtype())) return blocked_forward(*this, s, x.data<T>(), w.data<P>(), b, relu, y.write<T>());
    plain_forward(*this, s, x.data<T>(), w.data<P>(), b, relu, y.write<T>());
  });
}

void ReferenceBackend::conv2d_backward_data(const ConvShape& s, const Tensor& dy, const Tensor& w, Tensor& dx,
                                            bool add) {
  dispatch(dy.dtype(), "conv2d_backward_data", [&]<class T> {
    using P = Parameter<T>;
    if constexpr (!std::is_same_v<T, double>)
      if (blocked(dy.dtype())) return blocked_backward_data(*this, s, dy.data<T>(), w.data<P>(), dx.write<T>(), add);
    plain_backward_data(*this, s, dy.data<T>(), w.data<P>(), dx.write<T>(), add);
  });
}

void ReferenceBackend::conv2d_backward_filter(const ConvShape& s, const Tensor& x, const Tensor& dy, Tensor& dw,
                                              bool add) {
  dispatch(x.dtype(), "conv2d_backward_filter", [&]<class T> {
    using P = Parameter<T>;
    if constexpr (!std::is_same_v<T, double>)
      if (blocked(x.dtype())) return blocked_backward_filter(*this, s, x.data<T>(), dy.data<T>(), dw.write<P>(), add);
    plain_backward_filter(*this, s, x.data<T>(), dy.data<T>(), dw.write<P>(), add);
  });
}

}  // namespace tandem::reference
