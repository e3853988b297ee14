// Batch normalisation (Ioffe and Szegedy, 2015) of x[rows, channels], with the addition and the relu that follow it in
// a residual block. Per channel, over N = rows:
//
//   mean = Σx/N    variance = Σ(x − mean)²/N    inv = 1/√(variance + ε)    x̂ = (x − mean)·inv
//   y = relu?(γ·x̂ + β + residual?)
//
//   g = dy where y > 0 (all of dy without relu)    dβ = Σg    dγ = Σg·x̂    dresidual = g
//   dx = γ·inv·(g − dβ/N − x̂·dγ/N)
#include <cmath>

#include "core/reference/backend.h"

namespace tandem::reference {

template <class T>
void ReferenceKernels<T>::batch_norm(const NormShape& s, In<T> x, In<T> residual, In<P> gamma, In<P> beta,
                                     Out<P> running_mean, Out<P> running_variance, Out<T> y, Out<P> mean,
                                     Out<P> inverse_std) {
  const double count = static_cast<double>(s.rows);
  std::vector<double> m = sum_columns(threads_, s.rows, s.channels, [&](std::int64_t r, std::int64_t c) {
    return static_cast<double>(x[r * s.channels + c]);
  });
  for (double& sum : m) sum /= count;
  const std::vector<double> squares = sum_columns(threads_, s.rows, s.channels, [&](std::int64_t r, std::int64_t c) {
    const double d = static_cast<double>(x[r * s.channels + c]) - m[c];
    return d * d;
  });
  for (std::int64_t c = 0; c < s.channels; c++) {
    const double biased = squares[c] / count, unbiased = s.rows > 1 ? squares[c] / (count - 1) : biased;
    put(running_mean[c], (1 - s.momentum) * static_cast<double>(running_mean[c]) + s.momentum * m[c], false);
    put(running_variance[c], (1 - s.momentum) * static_cast<double>(running_variance[c]) + s.momentum * unbiased,
        false);
    put(mean[c], m[c], false);
    put(inverse_std[c], 1 / std::sqrt(biased + s.epsilon), false);
  }
  // From the statistics as they are stored: forward and backward must agree on the sign of y.
  normalise(s, x, residual, gamma, beta, mean.tensor, inverse_std.tensor, false, y);
}

template <class T>
void ReferenceKernels<T>::normalise(const NormShape& s, In<T> x, In<T> residual, In<P> gamma, In<P> beta, In<P> mean,
                                    In<P> spread, bool is_variance, Out<T> y) {
  std::vector<double> inverse(spread.data, spread.data + s.channels);
  if (is_variance)
    for (double& v : inverse) v = 1 / std::sqrt(v + s.epsilon);
  for_each(threads_, s.rows, s.rows * s.channels, [&](std::int64_t r) {
    for (std::int64_t c = 0; c < s.channels; c++) {
      const std::int64_t i = r * s.channels + c;
      const double x_hat = (static_cast<double>(x[i]) - static_cast<double>(mean[c])) * inverse[c];
      double v = static_cast<double>(gamma[c]) * x_hat + static_cast<double>(beta[c]);
      if (residual) v += static_cast<double>(residual[i]);
      put(y[i], s.relu ? relu(v) : v, false);
    }
  });
}

template <class T>
void ReferenceKernels<T>::batch_norm_backward(const NormShape& s, In<T> x, In<T> y, In<T> dy, In<P> gamma, In<P> beta,
                                              In<P> mean, In<P> inverse_std, const NormOutputs<T, P>& out) {
  const std::int64_t size = s.rows * s.channels;
  const auto x_hat = [&](std::int64_t i, std::int64_t c) {
    return (static_cast<double>(x[i]) - static_cast<double>(mean[c])) * static_cast<double>(inverse_std[c]);
  };

  // g first, in memory of its own: dresidual may be dy itself. A y that is NaN lets the gradient pass.
  Scratch scratch(memory_, static_cast<std::size_t>(size) * sizeof(P));
  P* g = scratch.carve<P>(static_cast<std::size_t>(size));
  for_each(threads_, s.rows, size, [&](std::int64_t r) {
    for (std::int64_t c = 0; c < s.channels; c++) {
      const std::int64_t i = r * s.channels + c;
      const double out_of_relu = !s.relu ? 1
                                 : y     ? static_cast<double>(y[i])
                                         : static_cast<double>(gamma[c]) * x_hat(i, c) + static_cast<double>(beta[c]);
      g[i] = out_of_relu <= 0 ? P(0) : static_cast<P>(dy[i]);
    }
  });

  const std::vector<double> dbeta = sum_columns(threads_, s.rows, s.channels, [&](std::int64_t r, std::int64_t c) {
    return static_cast<double>(g[r * s.channels + c]);
  });
  const std::vector<double> dgamma = sum_columns(threads_, s.rows, s.channels, [&](std::int64_t r, std::int64_t c) {
    const std::int64_t i = r * s.channels + c;
    return static_cast<double>(g[i]) * x_hat(i, c);
  });
  for (std::int64_t c = 0; c < s.channels; c++) {
    if (out.dbeta) put(out.dbeta[c], dbeta[c], out.add_dbeta);
    if (out.dgamma) put(out.dgamma[c], dgamma[c], out.add_dgamma);
  }

  const double count = static_cast<double>(s.rows);
  for_each(threads_, s.rows, size, [&](std::int64_t r) {
    for (std::int64_t c = 0; c < s.channels; c++) {
      const std::int64_t i = r * s.channels + c;
      const double centred = static_cast<double>(g[i]) - dbeta[c] / count - x_hat(i, c) * dgamma[c] / count;
      if (out.dx)
        put(out.dx[i], static_cast<double>(gamma[c]) * static_cast<double>(inverse_std[c]) * centred, out.add_dx);
      if (out.dresidual) put(out.dresidual[i], static_cast<double>(g[i]), out.add_dresidual);
    }
  });
}

template class ReferenceKernels<float>;  // the members that this file defines
template class ReferenceKernels<bf16>;
template class ReferenceKernels<double>;

}  // namespace tandem::reference
