// The kernels of the reference backend: every operation follows its textbook formula, in plain loops over float, bf16
// or double. They are slow and easy to check. The other backends are tested against them and share no kernel and no
// element-wise functor with them.
//
// Inputs have the type T, sums are in double, and a result is rounded once, when it is stored. Results are
// bit-identical for an equal number of threads.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include "core/launch.h"
#include "core/reference/backend.h"

namespace tandem::reference {

// relu(NaN) is NaN: a comparison with NaN is false.
inline double relu(double v) { return v < 0 ? 0.0 : v; }

// y = v, or y += v.
template <class T>
void put(T& y, double v, bool add = false) {
  y = T(add ? double(y) + v : v);
}

// Calls body(i) for every i in [0, n), on several threads if there are enough steps (of all calls) to pay for it.
template <class Body>
void for_each(int threads, std::int64_t n, std::int64_t steps, const Body& body) {
  parallel_ranges(steps >= parallel_grain ? threads : 1, n, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; i++) body(i);
  });
}

// sums[c] = Σ_r term(r·columns + c, c). Threads share the columns, not the rows, so the result does not depend on their
// number.
template <class Term>
std::vector<double> sum_columns(int threads, std::int64_t rows, std::int64_t columns, const Term& term) {
  std::vector<double> sums(std::size_t(columns), 0.0);
  parallel_ranges(rows * columns >= parallel_grain ? threads : 1, columns, 1,
                  [&](std::int64_t begin, std::int64_t end) {
                    for (std::int64_t r = 0; r < rows; r++)
                      for (std::int64_t c = begin; c < end; c++) sums[std::size_t(c)] += term(r * columns + c, c);
                  });
  return sums;
}

// A matrix; element (i, j) is data[i·row + j·column].
template <class E>
struct Matrix {
  const E* data;
  std::int64_t row, column;
  double operator()(std::int64_t i, std::int64_t j) const { return double(data[i * row + j * column]); }
};

// Calls finish(i·n + j, Σ_p a[i, p]·b[p, j]) for every element of a product [m, k]·[k, n].
template <class A, class B, class Finish>
void multiply(int threads, std::int64_t m, std::int64_t n, std::int64_t k, Matrix<A> a, Matrix<B> b,
              const Finish& finish) {
  for_each(threads, m, m * n * k, [&](std::int64_t i) {
    for (std::int64_t j = 0; j < n; j++) {
      double sum = 0;
      for (std::int64_t p = 0; p < k; p++) sum += a(i, p) * b(p, j);
      finish(i * n + j, sum);
    }
  });
}

// The output row that tap a of the filter connects with input row iy, or −1.
inline std::int64_t output_position(std::int64_t iy, std::int64_t a, std::int64_t pad, std::int64_t dilation,
                                    std::int64_t stride, std::int64_t outputs) {
  const std::int64_t t = iy + pad - a * dilation;
  return t >= 0 && t % stride == 0 && t / stride < outputs ? t / stride : -1;
}

// The position in x of the pixel that tap (a, b) of the filter reads for output (oy, ox) of picture n, or −1.
inline std::int64_t input_pixel(const ConvShape& s, std::int64_t n, std::int64_t oy, std::int64_t ox, std::int64_t a,
                                std::int64_t b) {
  const std::int64_t iy = oy * s.stride_h - s.pad_h + a * s.dilation_h;
  const std::int64_t ix = ox * s.stride_w - s.pad_w + b * s.dilation_w;
  return iy < 0 || iy >= s.h || ix < 0 || ix >= s.w ? -1 : ((n * s.h + iy) * s.w + ix) * s.c_in;
}

// A window of a pooling: its corner, which may lie outside the picture, and the pixels [top, bottom) × [left, right)
// of it that lie inside.
struct Window {
  std::int64_t y, x, top, bottom, left, right;
  Window(const PoolShape& s, std::int64_t oy, std::int64_t ox)
      : y(oy * s.stride_h - s.pad_h),
        x(ox * s.stride_w - s.pad_w),
        top(std::max<std::int64_t>(0, y)),
        bottom(std::min(s.h, y + s.kh)),
        left(std::max<std::int64_t>(0, x)),
        right(std::min(s.w, x + s.kw)) {}
  double size() const { return double((bottom - top) * (right - left)); }
  // Calls body(i, iy, ix) for the pixels inside, in the order of memory; i: their position in the picture.
  template <class Body>
  void each_pixel(const PoolShape& s, const Body& body) const {
    for (std::int64_t iy = top; iy < bottom; iy++)
      for (std::int64_t ix = left; ix < right; ix++) body((iy * s.w + ix) * s.c, iy, ix);
  }
};

// Calls body(i, n, window, c) for every output, whose position in y is i.
template <class Body>
void each_output(int threads, const PoolShape& s, const Body& body) {
  const std::int64_t out_h = s.out_h(), out_w = s.out_w();
  for_each(threads, s.n * out_h, s.n * out_h * out_w * s.c, [&](std::int64_t row) {
    for (std::int64_t i = row * out_w * s.c; i < (row + 1) * out_w * s.c; i++)
      body(i, row / out_h, Window(s, row % out_h, i / s.c % out_w), i % s.c);
  });
}

// log softmax of one row: log_p(x_c) = (x_c − largest) − log Σ exp(x − largest). Nothing overflows. The logarithm is
// not added to `largest` first: it would be lost next to a large logit.
struct RowSoftmax {
  double largest = -std::numeric_limits<double>::infinity(), log_sum = 0;
  template <class T>
  RowSoftmax(const T* x, std::int64_t n) {
    double sum = 0;
    for (std::int64_t c = 0; c < n; c++) largest = std::max(largest, double(x[c]));
    for (std::int64_t c = 0; c < n; c++) sum += std::exp(double(x[c]) - largest);
    log_sum = std::log(sum);
  }
  double log_p(double x) const { return (x - largest) - log_sum; }
};

// True when x[label] is the first of the largest elements; never in a row with a NaN.
template <class T>
bool is_largest(const T* x, std::int64_t n, std::int64_t label) {
  const double v = double(x[label]);
  for (std::int64_t c = 0; c < n; c++)
    if (c < label ? !(double(x[c]) < v) : !(double(x[c]) <= v)) return false;
  return true;
}

template <class T>
class ReferenceKernels : public Kernels<T> {
 public:
  using P = Accumulator<T>;
  ReferenceKernels(int threads, CachingAllocator& memory) : threads_(threads), memory_(memory) {}

  // ---- matrices: y[m, n] = x[m, k]·w[n, k]ᵀ + bias[n], dx[m, k] = dy[m, n]·w[n, k], dw[n, k] = dy[m, n]ᵀ·x[m, k] ----
  void gemm(bool transpose_a, bool transpose_b, std::int64_t batch, std::int64_t m, std::int64_t n, std::int64_t k,
            In<T> a, In<T> b, Out<T> c, bool add) override {
    for (std::int64_t s = 0; s < batch; s++) {
      const T *as = a + s * m * k, *bs = b + s * k * n;
      T* cs = c + s * m * n;
      const Matrix<T> left = transpose_a ? Matrix<T>{as, 1, m} : Matrix<T>{as, k, 1};
      const Matrix<T> right = transpose_b ? Matrix<T>{bs, 1, k} : Matrix<T>{bs, n, 1};
      multiply(threads_, m, n, k, left, right, [&](std::int64_t i, double v) { put(cs[i], v, add); });
    }
  }
  void linear(std::int64_t m, std::int64_t n, std::int64_t k, In<T> x, In<P> w, In<P> bias, bool with_relu,
              Out<T> y) override {
    multiply(threads_, m, n, k, Matrix<T>{x, k, 1}, Matrix<P>{w, 1, k}, [&](std::int64_t i, double v) {
      if (bias) v += double(bias[i % n]);
      put(y[i], with_relu ? relu(v) : v);
    });
  }
  void linear_backward_data(std::int64_t m, std::int64_t n, std::int64_t k, In<T> dy, In<P> w, Out<T> dx,
                            bool add) override {
    multiply(threads_, m, k, n, Matrix<T>{dy, n, 1}, Matrix<P>{w, k, 1},
             [&](std::int64_t i, double v) { put(dx[i], v, add); });
  }
  void linear_backward_weight(std::int64_t m, std::int64_t n, std::int64_t k, In<T> x, In<T> dy, Out<P> dw,
                              bool add) override {
    multiply(threads_, n, k, m, Matrix<T>{dy, 1, n}, Matrix<T>{x, k, 1},
             [&](std::int64_t i, double v) { put(dw[i], v, add); });
  }

  // ---- convolution and its gradients, x[n, h, w, c_in], w[c_out, kh, kw, c_in/groups], y[n, out_h, out_w, c_out] ----
  //   y[n, oy, ox, o]  = Σ_{a,b,c} x[n, oy·stride − pad + a·dilation, ox·stride − pad + b·dilation, c]·w[o, a, b, c]
  //   dx[n, iy, ix, c] = Σ_{o,a,b} dy[n, (iy + pad − a·dilation)/stride, …, o]·w[o, a, b, c]   where that divides
  //   dw[o, a, b, c]   = Σ_{n,oy,ox} dy[n, oy, ox, o]·x[n, oy·stride − pad + a·dilation, …, c]
  void conv2d(const ConvShape& s, In<T> x, In<P> w, In<P> bias, bool with_relu, Out<T> y) override {
    const std::int64_t out_h = s.out_h(), out_w = s.out_w(), in = s.c_in / s.groups, out = s.c_out / s.groups;
    for_each(threads_, s.n * out_h, s.y_numel(), [&](std::int64_t row) {
      for (std::int64_t ox = 0; ox < out_w; ox++)
        for (std::int64_t o = 0; o < s.c_out; o++) {
          double sum = bias ? double(bias[o]) : 0.0;
          for (std::int64_t a = 0; a < s.kh; a++)
            for (std::int64_t b = 0; b < s.kw; b++) {
              const std::int64_t pixel = input_pixel(s, row / out_h, row % out_h, ox, a, b);
              if (pixel < 0) continue;
              const T* from = x + pixel + o / out * in;
              const P* filter = w + ((o * s.kh + a) * s.kw + b) * in;
              for (std::int64_t c = 0; c < in; c++) sum += double(from[c]) * double(filter[c]);
            }
          put(y[(row * out_w + ox) * s.c_out + o], with_relu ? relu(sum) : sum);
        }
    });
  }
  void conv2d_backward_data(const ConvShape& s, In<T> dy, In<P> w, Out<T> dx, bool add) override {
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
                sum += double(from[o]) * double(w[((o * s.kh + a) * s.kw + b) * in + ci % in]);
            }
          put(dx[(row * s.w + ix) * s.c_in + ci], sum, add);
        }
    });
  }
  void conv2d_backward_filter(const ConvShape& s, In<T> x, In<T> dy, Out<P> dw, bool add) override {
    const std::int64_t out_h = s.out_h(), out_w = s.out_w(), in = s.c_in / s.groups, out = s.c_out / s.groups;
    for_each(threads_, s.c_out, s.y_numel(), [&](std::int64_t o) {
      for (std::int64_t a = 0; a < s.kh; a++)
        for (std::int64_t b = 0; b < s.kw; b++)
          for (std::int64_t c = 0; c < in; c++) {
            double sum = 0;
            for (std::int64_t i = 0; i < s.n * out_h * out_w; i++) {
              const std::int64_t pixel = input_pixel(s, i / out_w / out_h, i / out_w % out_h, i % out_w, a, b);
              if (pixel >= 0) sum += double(dy[i * s.c_out + o]) * double(x[pixel + o / out * in + c]);
            }
            put(dw[((o * s.kh + a) * s.kw + b) * in + c], sum, add);
          }
    });
  }

  // ---- pooling, x[n, h, w, c] → y[n, out_h, out_w, c]; windows may overlap and extend beyond the picture ------------
  void max_pool(const PoolShape& s, In<T> x, bool with_relu, Out<T> y, Out<std::uint8_t> argmax) override {
    each_output(threads_, s, [&](std::int64_t i, std::int64_t n, const Window& window, std::int64_t c) {
      P largest = -std::numeric_limits<P>::infinity();
      std::int64_t position = (window.top - window.y) * s.kw + window.left - window.x;
      window.each_pixel(s, [&](std::int64_t pixel, std::int64_t iy, std::int64_t ix) {
        const P v = x[n * s.h * s.w * s.c + pixel + c];
        if (!(v > largest || std::isnan(v))) return;  // the maximum with a NaN is NaN, so that failures stay visible
        largest = v;
        position = (iy - window.y) * s.kw + ix - window.x;
      });
      const bool cut = with_relu && largest <= 0;
      y[i] = cut ? P(0) : largest;
      if (argmax) argmax[i] = cut ? cut_by_relu : std::uint8_t(position);
    });
  }
  void max_pool_backward(const PoolShape& s, In<T> dy, In<std::uint8_t> argmax, Out<T> dx, bool add) override {
    pool_backward(s, dx, add, [&](double* sums, std::int64_t i, const Window& window) {
      const std::int64_t position = argmax[i], iy = window.y + position / s.kw, ix = window.x + position % s.kw;
      if (position != cut_by_relu) sums[(iy * s.w + ix) * s.c] += double(dy[i]);
    });
  }
  void average_pool(const PoolShape& s, In<T> x, Out<T> y) override {
    each_output(threads_, s, [&](std::int64_t i, std::int64_t n, const Window& window, std::int64_t c) {
      double sum = 0;
      window.each_pixel(s, [&](std::int64_t pixel, std::int64_t, std::int64_t) {
        sum += double(x[n * s.h * s.w * s.c + pixel + c]);
      });
      put(y[i], sum / window.size());
    });
  }
  void average_pool_backward(const PoolShape& s, In<T> dy, Out<T> dx, bool add) override {
    pool_backward(s, dx, add, [&](double* sums, std::int64_t i, const Window& window) {
      window.each_pixel(
          s, [&](std::int64_t pixel, std::int64_t, std::int64_t) { sums[pixel] += double(dy[i]) / window.size(); });
    });
  }

  // ---- batch normalisation (Ioffe and Szegedy, 2015), with the addition and the relu that follow it -----------------
  //   mean = Σx/N    variance = Σ(x − mean)²/N    inv = 1/√(variance + ε)    x̂ = (x − mean)·inv    N = rows
  //   y = relu?(γ·x̂ + β + residual?)
  //   g = dy where y > 0 (all of dy without relu)    dβ = Σg    dγ = Σg·x̂    dresidual = g
  //   dx = γ·inv·(g − dβ/N − x̂·dγ/N)
  void batch_norm(const NormShape& s, In<T> x, In<T> residual, In<P> gamma, In<P> beta, Out<P> running_mean,
                  Out<P> running_variance, Out<T> y, Out<P> mean, Out<P> inverse_std) override {
    const double count = double(s.rows);
    auto m = sum_columns(threads_, s.rows, s.channels, [&](std::int64_t i, std::int64_t) { return double(x[i]); });
    for (double& sum : m) sum /= count;
    const auto squares = sum_columns(threads_, s.rows, s.channels, [&](std::int64_t i, std::int64_t c) {
      const double d = double(x[i]) - m[std::size_t(c)];
      return d * d;
    });
    for (std::int64_t c = 0; c < s.channels; c++) {
      const double biased = squares[c] / count, unbiased = s.rows > 1 ? squares[c] / (count - 1) : biased;
      put(running_mean[c], (1 - s.momentum) * double(running_mean[c]) + s.momentum * m[c]);
      put(running_variance[c], (1 - s.momentum) * double(running_variance[c]) + s.momentum * unbiased);
      put(mean[c], m[c]);
      put(inverse_std[c], 1 / std::sqrt(biased + s.epsilon));
    }
    // Uses the statistics as they are stored, so that forward and backward agree on the sign of y.
    normalise(s, x, residual, gamma, beta, mean.tensor, inverse_std.tensor, false, y);
  }
  void normalise(const NormShape& s, In<T> x, In<T> residual, In<P> gamma, In<P> beta, In<P> mean, In<P> spread,
                 bool is_variance, Out<T> y) override {
    std::vector<double> inverse(spread.data, spread.data + s.channels);
    if (is_variance)
      for (double& v : inverse) v = 1 / std::sqrt(v + s.epsilon);
    for_each(threads_, s.rows, s.rows * s.channels, [&](std::int64_t r) {
      for (std::int64_t c = 0, i = r * s.channels; c < s.channels; c++, i++) {
        const double x_hat = (double(x[i]) - double(mean[c])) * inverse[c];
        double v = double(gamma[c]) * x_hat + double(beta[c]);
        if (residual) v += double(residual[i]);
        put(y[i], s.relu ? relu(v) : v);
      }
    });
  }
  void batch_norm_backward(const NormShape& s, In<T> x, In<T> y, In<T> dy, In<P> gamma, In<P> beta, In<P> mean,
                           In<P> inverse_std, const NormOutputs<T, P>& out) override {
    const std::int64_t size = s.rows * s.channels;
    const auto x_hat = [&](std::int64_t i, std::int64_t c) {
      return (double(x[i]) - double(mean[c])) * double(inverse_std[c]);
    };
    // g is computed first, in separate memory, since dresidual may be dy itself. Where y is NaN, g is dy.
    Scratch scratch(memory_, std::size_t(size) * sizeof(P));
    P* g = scratch.carve<P>(std::size_t(size));
    for_each(threads_, s.rows, size, [&](std::int64_t r) {
      for (std::int64_t c = 0, i = r * s.channels; c < s.channels; c++, i++) {
        const double out_of_relu = !s.relu ? 1 : y ? double(y[i]) : double(gamma[c]) * x_hat(i, c) + double(beta[c]);
        g[i] = out_of_relu <= 0 ? P(0) : P(dy[i]);
      }
    });
    const auto dbeta =
        sum_columns(threads_, s.rows, s.channels, [&](std::int64_t i, std::int64_t) { return double(g[i]); });
    const auto dgamma = sum_columns(threads_, s.rows, s.channels,
                                    [&](std::int64_t i, std::int64_t c) { return double(g[i]) * x_hat(i, c); });
    for (std::int64_t c = 0; c < s.channels; c++) {
      if (out.dbeta) put(out.dbeta[c], dbeta[c], out.add_dbeta);
      if (out.dgamma) put(out.dgamma[c], dgamma[c], out.add_dgamma);
    }
    const double count = double(s.rows);
    for_each(threads_, s.rows, size, [&](std::int64_t r) {
      for (std::int64_t c = 0, i = r * s.channels; c < s.channels; c++, i++) {
        const double centred = double(g[i]) - dbeta[c] / count - x_hat(i, c) * dgamma[c] / count;
        if (out.dx) put(out.dx[i], double(gamma[c]) * double(inverse_std[c]) * centred, out.add_dx);
        if (out.dresidual) put(out.dresidual[i], double(g[i]), out.add_dresidual);
      }
    });
  }

  // ---- sums along axes, and cross-entropy ---------------------------------------------------------------------------
  void sum_rows(std::int64_t rows, std::int64_t channels, In<T> dy, Out<P> db, bool add) override {
    const auto sums =
        sum_columns(threads_, rows, channels, [&](std::int64_t i, std::int64_t) { return double(dy[i]); });
    for (std::int64_t c = 0; c < channels; c++) put(db[c], sums[c], add);
  }
  void reduce(Reduction op, std::int64_t outer, std::int64_t middle, std::int64_t inner, In<T> x, Out<T> y,
              bool add) override {
    for_each(threads_, outer * inner, outer * middle * inner, [&](std::int64_t i) {
      const T* from = x + i / inner * middle * inner + i % inner;
      double result = op == Reduction::sum ? 0.0 : -std::numeric_limits<double>::infinity();
      for (std::int64_t k = 0; k < middle; k++) {
        const double v = double(from[k * inner]);
        if (op == Reduction::sum)
          result += v;
        else if (v > result || std::isnan(v))
          result = v;  // a NaN is kept: no number is greater
      }
      put(y[i], result, add);
    });
  }
  // Each thread sums a part. The parts depend only on n and the number of threads.
  void squared_norm(std::int64_t n, In<T> x, Out<P> y, bool add) override {
    const int parts = n >= parallel_grain ? threads_ : 1;
    std::vector<double> sums(std::size_t(parts), 0.0);
    in_parts(parts, [&](int part) {
      double sum = 0;
#pragma omp simd reduction(+ : sum)
      for (std::int64_t i = n * part / parts; i < n * (part + 1) / parts; i++) sum += double(x[i]) * double(x[i]);
      sums[std::size_t(part)] = sum;
    });
    put(*y, std::accumulate(sums.begin(), sums.end(), 0.0), add);
  }
  // −Σ_c q_c·log p_c with q = (1 − ε)·onehot + ε/classes is −(1 − ε)·log p[label] − ε/classes·Σ_c log p_c.
  void cross_entropy(std::int64_t rows, std::int64_t classes, In<T> x, In<std::int32_t> labels, double smoothing,
                     Out<P> loss, Out<P> probabilities, Out<std::int32_t> correct) override {
    double total = 0;
    std::int32_t hits = 0;
    for (std::int64_t r = 0; r < rows; r++) {
      const T* row = x + r * classes;
      const RowSoftmax softmax(row, classes);
      double sum = 0;  // Σ_c log p_c
      for (std::int64_t c = 0; c < classes; c++) {
        const double log_p = softmax.log_p(double(row[c]));
        sum += log_p;
        put(probabilities[r * classes + c], std::exp(log_p));
      }
      total -= (1 - smoothing) * softmax.log_p(double(row[labels[r]]));
      if (smoothing > 0) total -= smoothing / double(classes) * sum;  // else 0·∞ for a logit of −∞
      hits += is_largest(row, classes, labels[r]);
    }
    put(*loss, total / double(rows));
    if (correct) *correct += hits;
  }
  // dx[r, c] = dloss·(p[r, c] − q[r, c])/rows
  void cross_entropy_backward(std::int64_t rows, std::int64_t classes, In<P> probabilities, In<std::int32_t> labels,
                              double smoothing, In<P> dloss, Out<T> dx, bool add) override {
    const double scale = double(*dloss) / double(rows);
    for (std::int64_t i = 0; i < rows * classes; i++) {
      const double q = (i % classes == labels[i / classes] ? 1 - smoothing : 0.0) + smoothing / double(classes);
      put(dx[i], scale * (double(probabilities[i]) - q), add);
    }
  }

 private:
  static constexpr std::uint8_t cut_by_relu = 255;

  // Calls scatter(sums of the output's channel, i, window), which adds to the sums, for each output i; then dx (+)=
  // sums. The sums are in double, since windows may overlap.
  template <class Scatter>
  void pool_backward(const PoolShape& s, T* dx, bool add, const Scatter& scatter) {
    const std::int64_t picture = s.h * s.w * s.c;
    const int parts = s.n * picture >= parallel_grain ? threads_ : 1;
    Scratch scratch(memory_, std::size_t(parts * picture) * sizeof(double));
    double* all = scratch.carve<double>(std::size_t(parts * picture));
    in_parts(parts, [&](int part) {
      double* sums = all + part * picture;
      for (std::int64_t n = s.n * part / parts; n < s.n * (part + 1) / parts; n++) {
        std::fill(sums, sums + picture, 0.0);
        std::int64_t i = n * s.out_h() * s.out_w() * s.c;
        for (std::int64_t oy = 0; oy < s.out_h(); oy++)
          for (std::int64_t ox = 0; ox < s.out_w(); ox++)
            for (std::int64_t c = 0; c < s.c; c++) scatter(sums + c, i++, Window(s, oy, ox));
        for (std::int64_t k = 0; k < picture; k++) put(dx[n * picture + k], sums[k], add);
      }
    });
  }

  int threads_;
  CachingAllocator& memory_;  // for scratch as large as a tensor
};

}  // namespace tandem::reference
