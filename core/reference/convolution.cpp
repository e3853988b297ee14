// Convolution and its two gradients, x[n, h, w, c_in], w[c_out, kh, kw, c_in/groups], y[n, out_h, out_w, c_out]:
//
//   y[n, oy, ox, o]  = Σ_{a,b,c} x[n, oy·stride − pad + a·dilation, ox·stride − pad + b·dilation, c]·w[o, a, b, c]
//   dx[n, iy, ix, c] = Σ_{o,a,b} dy[n, (iy + pad − a·dilation)/stride, …, o]·w[o, a, b, c]   where that divides
//   dw[o, a, b, c]   = Σ_{n,oy,ox} dy[n, oy, ox, o]·x[n, oy·stride − pad + a·dilation, …, c]
#include "core/reference/backend.h"

namespace tandem::reference {

namespace {

// The output row that tap a of the filter connects with input row iy, or −1.
std::int64_t output_position(std::int64_t iy, std::int64_t a, std::int64_t pad, std::int64_t dilation,
                             std::int64_t stride, std::int64_t outputs) {
  const std::int64_t t = iy + pad - a * dilation;
  return t >= 0 && t % stride == 0 && t / stride < outputs ? t / stride : -1;
}

// The position in x of the pixel that tap (a, b) of the filter reads for output (oy, ox) of picture n, or −1.
std::int64_t input_pixel(const ConvShape& s, std::int64_t n, std::int64_t oy, std::int64_t ox, std::int64_t a,
                         std::int64_t b) {
  const std::int64_t iy = oy * s.stride_h - s.pad_h + a * s.dilation_h;
  const std::int64_t ix = ox * s.stride_w - s.pad_w + b * s.dilation_w;
  return iy < 0 || iy >= s.h || ix < 0 || ix >= s.w ? -1 : ((n * s.h + iy) * s.w + ix) * s.c_in;
}

}  // namespace

template <class T>
void ReferenceKernels<T>::conv2d(const ConvShape& s, In<T> x, In<P> w, In<P> bias, bool with_relu, Out<T> y) {
  const std::int64_t out_h = s.out_h(), out_w = s.out_w(), in = s.c_in / s.groups, out = s.c_out / s.groups;
  for_each(threads_, s.n * out_h, s.y_numel(), [&](std::int64_t row) {
    for (std::int64_t ox = 0; ox < out_w; ox++)
      for (std::int64_t o = 0; o < s.c_out; o++) {
        double sum = bias ? static_cast<double>(bias[o]) : 0.0;
        for (std::int64_t a = 0; a < s.kh; a++)
          for (std::int64_t b = 0; b < s.kw; b++) {
            const std::int64_t pixel = input_pixel(s, row / out_h, row % out_h, ox, a, b);
            if (pixel < 0) continue;
            const T* from = x + pixel + o / out * in;
            const P* filter = w + ((o * s.kh + a) * s.kw + b) * in;
            for (std::int64_t c = 0; c < in; c++) sum += static_cast<double>(from[c]) * static_cast<double>(filter[c]);
          }
        put(y[(row * out_w + ox) * s.c_out + o], with_relu ? relu(sum) : sum, false);
      }
  });
}

template <class T>
void ReferenceKernels<T>::conv2d_backward_data(const ConvShape& s, In<T> dy, In<P> w, Out<T> dx, bool add) {
  const std::int64_t out_h = s.out_h(), out_w = s.out_w(), in = s.c_in / s.groups, out = s.c_out / s.groups;
  for_each(threads_, s.n * s.h, s.x_numel(), [&](std::int64_t row) {
    for (std::int64_t ix = 0; ix < s.w; ix++)
      for (std::int64_t ci = 0; ci < s.c_in; ci++) {
        const std::int64_t group = ci / in;
        double sum = 0;
        for (std::int64_t a = 0; a < s.kh; a++)
          for (std::int64_t b = 0; b < s.kw; b++) {
            const std::int64_t oy = output_position(row % s.h, a, s.pad_h, s.dilation_h, s.stride_h, out_h);
            const std::int64_t ox = output_position(ix, b, s.pad_w, s.dilation_w, s.stride_w, out_w);
            if (oy < 0 || ox < 0) continue;
            const T* from = dy + ((row / s.h * out_h + oy) * out_w + ox) * s.c_out;
            for (std::int64_t o = group * out; o < (group + 1) * out; o++)
              sum += static_cast<double>(from[o]) * static_cast<double>(w[((o * s.kh + a) * s.kw + b) * in + ci % in]);
          }
        put(dx[(row * s.w + ix) * s.c_in + ci], sum, add);
      }
  });
}

template <class T>
void ReferenceKernels<T>::conv2d_backward_filter(const ConvShape& s, In<T> x, In<T> dy, Out<P> dw, bool add) {
  const std::int64_t out_h = s.out_h(), out_w = s.out_w(), in = s.c_in / s.groups, out = s.c_out / s.groups;
  for_each(threads_, s.c_out, s.y_numel(), [&](std::int64_t o) {
    for (std::int64_t a = 0; a < s.kh; a++)
      for (std::int64_t b = 0; b < s.kw; b++)
        for (std::int64_t c = 0; c < in; c++) {
          double sum = 0;
          for (std::int64_t n = 0; n < s.n; n++)
            for (std::int64_t oy = 0; oy < out_h; oy++)
              for (std::int64_t ox = 0; ox < out_w; ox++) {
                const std::int64_t pixel = input_pixel(s, n, oy, ox, a, b);
                if (pixel < 0) continue;
                sum += static_cast<double>(dy[((n * out_h + oy) * out_w + ox) * s.c_out + o]) *
                       static_cast<double>(x[pixel + o / out * in + c]);
              }
          put(dw[((o * s.kh + a) * s.kw + b) * in + c], sum, add);
        }
  });
}

template class ReferenceKernels<float>;  // the members that this file defines
template class ReferenceKernels<bf16>;
template class ReferenceKernels<double>;

}  // namespace tandem::reference
