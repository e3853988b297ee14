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

template <class T, class P>
void forward(Backend& backend, const ConvShape& s, const T* x, const P* w, const P* bias, bool relu, T* y) {
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
void backward_data(Backend& backend, const ConvShape& s, const T* dy, const P* w, T* dx, bool add) {
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
void backward_filter(Backend& backend, const ConvShape& s, const T* x, const T* dy, P* dw, bool add) {
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

}  // namespace

void ReferenceBackend::conv2d(const ConvShape& s, const Tensor& x, const Tensor& w, const Tensor* bias, bool relu,
                              Tensor& y) {
  dispatch(x.dtype(), "conv2d", [&]<class T> {
    using P = Parameter<T>;
    const P* b = bias ? bias->data<P>() : nullptr;
    forward(*this, s, x.data<T>(), w.data<P>(), b, relu, y.write<T>());
  });
}

void ReferenceBackend::conv2d_backward_data(const ConvShape& s, const Tensor& dy, const Tensor& w, Tensor& dx,
                                            bool add) {
  dispatch(dy.dtype(), "conv2d_backward_data", [&]<class T> {
    using P = Parameter<T>;
    backward_data(*this, s, dy.data<T>(), w.data<P>(), dx.write<T>(), add);
  });
}

void ReferenceBackend::conv2d_backward_filter(const ConvShape& s, const Tensor& x, const Tensor& dy, Tensor& dw,
                                              bool add) {
  dispatch(x.dtype(), "conv2d_backward_filter", [&]<class T> {
    using P = Parameter<T>;
    backward_filter(*this, s, x.data<T>(), dy.data<T>(), dw.write<P>(), add);
  });
}

}  // namespace tandem::reference
