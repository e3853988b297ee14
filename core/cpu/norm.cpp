// Batch norm: x, y [rows, channels], statistics per channel over the rows.
//
// The cost is memory traffic, so each pass reads memory once, in one parallel region. Forward reads x for the
// statistics, then reads x (and the residual) and writes y. Backward reads x and dy for the two sums of the gradient,
// then again to write dx. The second pass runs backwards, so that it begins with data that is still in the cache.
#include <cmath>
#include <functional>
#include <vector>

#include "core/cpu/kernels.h"
#include "core/cpu/norm_passes.h"
#include "core/launch.h"

namespace tandem::cpu {
namespace {

// For a small tensor, waking threads costs more than the work.
int worth(int threads, const Fold& f) { return f.rows * f.width + f.tail < parallel_grain ? 1 : threads; }

// Σ(x − mean)² loses digits when it is computed as Σx² − …, unless x is shifted by something near its mean first. The
// mean of a few rows, taken from the whole batch, is close enough. It is the same for all threads, so their sums can be
// added.
template <class T>
void sample_mean(const Fold& f, std::int64_t rows, const T* x, float* shift) {
  constexpr std::int64_t samples = 17;  // an odd number: not the same pixel of every picture
  for (std::int64_t c = 0; c < f.channels; c++) shift[c] = 0;
  const std::int64_t n = std::min(rows, samples);
  for (std::int64_t i = 0; i < n; i++) {
    const T* row = x + (2 * i + 1) * rows / (2 * n) * f.channels;
    for (std::int64_t c = 0; c < f.channels; c++) shift[c] += float(row[c]) / float(n);
  }
  f.repeat(shift);
}

// y = relu?(x·scale + offset + residual?); scale and offset have room for f.width values.
template <class T>
void normalise_all(const Fold& f, int threads, Order order, bool relu_after, const T* x, const T* residual,
                   float* scale, float* offset, T* y) {
  f.repeat(scale);
  f.repeat(offset);
  threads = worth(threads, f);
  choose(residual != nullptr, [&](auto with_residual) {
    choose(relu_after, [&](auto with_relu) {
      in_parts(threads, [&](int part) {
        sweep(f, part, threads, order, [&](auto whole, std::int64_t at, std::int64_t column, std::int64_t rows, int n) {
          const Panel a(scale + column), b(offset + column);
          for (std::int64_t r = 0; r < rows; r++, at += f.width)
            for (int i = 0; i < 4; i++) {
              vf v = read_lane<whole>(x + at, i, n) * a[i] + b[i];
              if constexpr (with_residual) v += read_lane<whole>(residual + at, i, n);
              if constexpr (with_relu) v = relu(v);
              write_lane<whole>(y + at, i, n, v);
            }
        });
      });
    });
  });
}

}  // namespace

void Moments::total(double* mean, double* variance) const {
  const double n = double(counted());
  std::fill(mean, mean + channels, 0.0);
  std::fill(variance, variance + channels, 0.0);
  const float* at = parts.data();
  for (std::int64_t part : rows) {
    for (std::int64_t c = 0; c < channels; c++)
      mean[c] += (double(at[c]) * double(part) + double(at[channels + c])) / n;
    at += fields * channels;
  }
  at = parts.data();
  // Σ(y − mean)² of a part = Σ(y − shift)² − 2·d·Σ(y − shift) + rows·d² with d = mean − shift
  for (std::int64_t part : rows) {
    for (std::int64_t c = 0; c < channels; c++) {
      const double d = mean[c] - double(at[c]), sum = double(at[channels + c]);
      variance[c] += double(at[2 * channels + c]) + d * (double(part) * d - 2 * sum);
    }
    at += fields * channels;
  }
  for (std::int64_t c = 0; c < channels; c++) variance[c] = std::max(variance[c] / n, 0.0);
}

// ---- forward --------------------------------------------------------------------------------------------------------
template <class T>
void CpuKernels<T>::batch_norm(const NormShape& s, In<T> x, In<T> residual, In<float> gamma, In<float> beta,
                               Out<float> running_mean, Out<float> running_variance, Out<T> y, Out<float> mean,
                               Out<float> inverse_std) {
  // If x is the unchanged result of a convolution that computed its statistics, the first pass over x is omitted.
  const Moments* moments = &shared_.moments;
  if (shared_.measured != state_of(*x.tensor) || moments->counted() != s.rows || moments->channels != s.channels)
    moments = nullptr;
  const Fold f(s.rows, s.channels);
  const int threads = worth(threads_, f);
  // Per part Σ(x − shift), Σ(x − shift)²; or, in a single part, mean and variance that are already known.
  std::vector<double> sums(2 * f.width * (moments ? 1 : threads));
  std::vector<float> values(3 * f.width);
  float *shift = values.data(), *scale = shift + f.width, *offset = scale + f.width;
  if (moments) {
    moments->total(sums.data(), sums.data() + f.width);
  } else {
    sample_mean(f, s.rows, x.data, shift);
    in_parts(threads, [&](int part) {
      double *sum = sums.data() + 2 * f.width * part, *squares = sum + f.width;
      sweep(f, part, threads, Order::forwards,
            [&](auto whole, std::int64_t at, std::int64_t column, std::int64_t rows, int n) {
              const Panel k(shift + column);
              vf total[4] = {}, square[4] = {};
              for (std::int64_t r = 0; r < rows; r++, at += f.width)
                for (int i = 0; i < 4; i++) {
                  vf d = read_lane<whole>(x + at, i, n) - k[i];
                  if constexpr (!whole) d = keep(d, within(i, n));
                  total[i] += d;
                  square[i] += d * d;
                }
              combine_panel(std::plus<double>(), sum + column, total);
              combine_panel(std::plus<double>(), squares + column, square);
            });
      f.gather(sum);
      f.gather(squares);
    });
  }
  const double rows = double(s.rows), unbiased = s.rows > 1 ? rows / (rows - 1) : 1;
  for (std::int64_t c = 0; c < s.channels; c++) {
    double average = sums[c], variance = sums[f.width + c];
    if (!moments) {
      double total = 0, square = 0;
      for (int t = 0; t < threads; t++) {
        total += sums[2 * f.width * t + c];
        square += sums[2 * f.width * t + f.width + c];
      }
      average = shift[c] + total / rows;
      variance = std::max(square / rows - total / rows * (total / rows), 0.0);  // keeps a NaN
    }
    const float m = float(average), inverse = float(1 / std::sqrt(variance + s.epsilon));
    scale[c] = gamma[c] * inverse;
    offset[c] = std::fma(-m, scale[c], beta[c]);  // backward computes the same bits, for its mask
    mean[c] = m;
    inverse_std[c] = inverse;
    running_mean[c] += float(s.momentum * (average - running_mean[c]));
    running_variance[c] += float(s.momentum * (variance * unbiased - running_variance[c]));
  }
  normalise_all<T>(f, threads, Order::backwards, s.relu, x, residual, scale, offset, y);
}

template <class T>
void CpuKernels<T>::normalise(const NormShape& s, In<T> x, In<T> residual, In<float> gamma, In<float> beta,
                              In<float> mean, In<float> spread, bool is_variance, Out<T> y) {
  const Fold f(s.rows, s.channels);
  std::vector<float> values(2 * f.width);
  float *scale = values.data(), *offset = scale + f.width;
  for (std::int64_t c = 0; c < s.channels; c++) {
    scale[c] = is_variance ? float(gamma[c] / std::sqrt(spread[c] + s.epsilon)) : gamma[c] * spread[c];
    offset[c] = std::fma(-mean[c], scale[c], beta[c]);
  }
  normalise_all<T>(f, threads_, Order::forwards, s.relu, x, residual, scale, offset, y);
}

// ---- backward -------------------------------------------------------------------------------------------------------
// With d = dy, or 0 where y ≤ 0 (without ReLU: d = dy), and x̂ = (x − mean)·inverse standard deviation:
//   dbeta = Σ d,  dgamma = Σ d·x̂,  dx = gamma·inverse·(d − dbeta/rows − x̂·dgamma/rows),  dresidual = d.
template <class T>
void CpuKernels<T>::batch_norm_backward(const NormShape& s, In<T> x, In<T> y, In<T> dy, In<float> gamma, In<float> beta,
                                        In<float> mean, In<float> inverse_std, const NormOutputs<T, float>& out) {
  const GradientPasses<T> pass{Fold(s.rows, s.channels), x, y, dy, out, !s.relu ? no_mask : y ? from_y : from_x};
  const Fold& f = pass.f;
  const int threads = worth(threads_, f);
  for (std::int64_t c = 0; c < s.channels; c++) {
    pass.center[c] = mean[c];
    pass.scale[c] = gamma[c] * inverse_std[c];
    pass.offset[c] = std::fma(-mean[c], pass.scale[c], beta[c]);
  }
  for (float* v : {pass.center, pass.scale, pass.offset}) f.repeat(v);
  std::vector<double> sums(2 * f.width * threads);  // per part Σ d, Σ d·(x − mean)
  in_parts(threads, [&](int part) {
    double* sum = sums.data() + 2 * f.width * part;
    pass.add_up(part, threads, sum, sum + f.width);
  });
  const double rows = double(s.rows);
  for (std::int64_t c = 0; c < s.channels; c++) {
    double total = 0, dot = 0;
    for (int t = 0; t < threads; t++) {
      total += sums[2 * f.width * t + c];
      dot += sums[2 * f.width * t + f.width + c];
    }
    const double inverse = inverse_std[c], dgamma = dot * inverse;
    pass.slope[c] = float(-pass.scale[c] * inverse * dgamma / rows);
    pass.constant[c] = float(-pass.scale[c] * total / rows);
    if (out.dgamma) out.dgamma[c] = float(dgamma + (out.add_dgamma ? out.dgamma[c] : 0.f));
    if (out.dbeta) out.dbeta[c] = float(total + (out.add_dbeta ? out.dbeta[c] : 0.f));
  }
  for (float* v : {pass.slope, pass.constant}) f.repeat(v);
  if (out.dx || (out.dresidual && !pass.keep_masked)) in_parts(threads, [&](int part) { pass.write(part, threads); });
}

template class CpuKernels<float>;  // the members that this file defines
template class CpuKernels<bf16>;

}  // namespace tandem::cpu
