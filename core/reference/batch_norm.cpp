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

namespace {

// x̂, always from the statistics as they are stored: forward and backward must agree on the sign of y.
double normalised(double x, double mean, double inverse) { return (x - mean) * inverse; }

template <class T, class P>
void apply(Backend& backend, const NormShape& s, const T* x, const T* residual, const P* gamma, const P* beta,
           const double* mean, const double* inverse, T* y) {
  for_parts(parts_for(backend, s.rows * s.channels), s.rows, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; r++)
      for (std::int64_t c = 0; c < s.channels; c++) {
        const std::int64_t i = r * s.channels + c;
        double v = static_cast<double>(gamma[c]) * normalised(static_cast<double>(x[i]), mean[c], inverse[c]) +
                   static_cast<double>(beta[c]);
        if (residual) v += static_cast<double>(residual[i]);
        put(y[i], s.relu ? reference::relu(v) : v, false);
      }
  });
}

}  // namespace

void ReferenceBackend::batch_norm(const NormShape& s, const Tensor& x, const Tensor* residual, const Tensor& gamma,
                                  const Tensor& beta, Tensor& running_mean, Tensor& running_variance, Tensor& y,
                                  Tensor& mean, Tensor& inverse_std) {
  dispatch(x.dtype(), "batch_norm", [&]<class T> {
    using P = Parameter<T>;
    const double count = static_cast<double>(s.rows);
    const T* xp = x.data<T>();
    P *running_mean_p = running_mean.write<P>(), *running_variance_p = running_variance.write<P>();
    P *mean_p = mean.write<P>(), *inverse_p = inverse_std.write<P>();
    Scratch<double> means(*this, s.channels), sums(*this, s.channels);
    double *m = means.data(), *v = sums.data();

    sum_columns(*this, s.rows, s.channels, m,
                [&](std::int64_t r, std::int64_t c) { return static_cast<double>(xp[r * s.channels + c]); });
    for (std::int64_t c = 0; c < s.channels; c++) m[c] /= count;
    sum_columns(*this, s.rows, s.channels, v, [&](std::int64_t r, std::int64_t c) {
      const double d = static_cast<double>(xp[r * s.channels + c]) - m[c];
      return d * d;
    });
    for (std::int64_t c = 0; c < s.channels; c++) {
      const double biased = v[c] / count, unbiased = s.rows > 1 ? v[c] / (count - 1) : biased;
      put(running_mean_p[c], (1 - s.momentum) * static_cast<double>(running_mean_p[c]) + s.momentum * m[c], false);
      put(running_variance_p[c], (1 - s.momentum) * static_cast<double>(running_variance_p[c]) + s.momentum * unbiased,
          false);
      put(mean_p[c], m[c], false);
      put(inverse_p[c], 1 / std::sqrt(biased + s.epsilon), false);
      m[c] = static_cast<double>(mean_p[c]);
      v[c] = static_cast<double>(inverse_p[c]);
    }
    apply(*this, s, xp, residual ? residual->data<T>() : nullptr, gamma.data<P>(), beta.data<P>(), m, v, y.write<T>());
  });
}

void ReferenceBackend::batch_norm_inference(const NormShape& s, const Tensor& x, const Tensor* residual,
                                            const Tensor& gamma, const Tensor& beta, const Tensor& mean,
                                            const Tensor& variance, Tensor& y) {
  dispatch(x.dtype(), "batch_norm_inference", [&]<class T> {
    using P = Parameter<T>;
    Scratch<double> means(*this, s.channels), inverses(*this, s.channels);
    for (std::int64_t c = 0; c < s.channels; c++) {
      means.data()[c] = static_cast<double>(mean.data<P>()[c]);
      inverses.data()[c] = 1 / std::sqrt(static_cast<double>(variance.data<P>()[c]) + s.epsilon);
    }
    apply(*this, s, x.data<T>(), residual ? residual->data<T>() : nullptr, gamma.data<P>(), beta.data<P>(),
          means.data(), inverses.data(), y.write<T>());
  });
}

void ReferenceBackend::batch_norm_again(const NormShape& s, const Tensor& x, const Tensor* residual,
                                        const Tensor& gamma, const Tensor& beta, const Tensor& mean,
                                        const Tensor& inverse_std, Tensor& y) {
  dispatch(x.dtype(), "batch_norm_again", [&]<class T> {
    using P = Parameter<T>;
    Scratch<double> means(*this, s.channels), inverses(*this, s.channels);
    for (std::int64_t c = 0; c < s.channels; c++) {
      means.data()[c] = static_cast<double>(mean.data<P>()[c]);
      inverses.data()[c] = static_cast<double>(inverse_std.data<P>()[c]);
    }
    apply(*this, s, x.data<T>(), residual ? residual->data<T>() : nullptr, gamma.data<P>(), beta.data<P>(),
          means.data(), inverses.data(), y.write<T>());
  });
}

void ReferenceBackend::batch_norm_backward(const NormShape& s, const Tensor& x, const Tensor* y, const Tensor& dy,
                                           const Tensor& gamma, const Tensor& beta, const Tensor& mean,
                                           const Tensor& inverse_std, const NormGradients& out) {
  dispatch(x.dtype(), "batch_norm_backward", [&]<class T> {
    using P = Parameter<T>;
    using A = Accumulator<T>;
    const std::int64_t size = s.rows * s.channels;
    const T *xp = x.data<T>(), *yp = y ? y->data<T>() : nullptr, *dyp = dy.data<T>();
    const P *gamma_p = gamma.data<P>(), *beta_p = beta.data<P>(), *mean_p = mean.data<P>();
    const P* inverse_p = inverse_std.data<P>();
    const auto x_hat = [&](std::int64_t r, std::int64_t c) {
      return normalised(static_cast<double>(xp[r * s.channels + c]), static_cast<double>(mean_p[c]),
                        static_cast<double>(inverse_p[c]));
    };

    // g first, in memory of its own: dresidual may be dy itself. A y that is NaN lets the gradient pass.
    Scratch<A> masked(*this, size);
    A* g = masked.data();
    for_parts(parts_for(*this, size), s.rows, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
      for (std::int64_t r = begin; r < end; r++)
        for (std::int64_t c = 0; c < s.channels; c++) {
          const std::int64_t i = r * s.channels + c;
          double out_of_relu = 1;
          if (s.relu)
            out_of_relu = yp ? static_cast<double>(yp[i])
                             : static_cast<double>(gamma_p[c]) * x_hat(r, c) + static_cast<double>(beta_p[c]);
          g[i] = out_of_relu <= 0 ? A(0) : static_cast<A>(dyp[i]);
        }
    });

    Scratch<double> sums(*this, 2 * s.channels);
    double *dbeta = sums.data(), *dgamma = sums.data() + s.channels;
    sum_columns(*this, s.rows, s.channels, dbeta,
                [&](std::int64_t r, std::int64_t c) { return static_cast<double>(g[r * s.channels + c]); });
    sum_columns(*this, s.rows, s.channels, dgamma, [&](std::int64_t r, std::int64_t c) {
      return static_cast<double>(g[r * s.channels + c]) * x_hat(r, c);
    });
    if (P* to = out.dbeta ? out.dbeta->write<P>() : nullptr)
      for (std::int64_t c = 0; c < s.channels; c++) put(to[c], dbeta[c], out.add_dbeta);
    if (P* to = out.dgamma ? out.dgamma->write<P>() : nullptr)
      for (std::int64_t c = 0; c < s.channels; c++) put(to[c], dgamma[c], out.add_dgamma);

    T* dx = out.dx ? out.dx->write<T>() : nullptr;
    T* dresidual = out.dresidual ? out.dresidual->write<T>() : nullptr;
    const double count = static_cast<double>(s.rows);
    for_parts(parts_for(*this, size), s.rows, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
      if (dx)
        for (std::int64_t r = begin; r < end; r++)
          for (std::int64_t c = 0; c < s.channels; c++) {
            const double centred =
                static_cast<double>(g[r * s.channels + c]) - dbeta[c] / count - x_hat(r, c) * dgamma[c] / count;
            put(dx[r * s.channels + c], static_cast<double>(gamma_p[c]) * static_cast<double>(inverse_p[c]) * centred,
                out.add_dx);
          }
      if (dresidual)
        for (std::int64_t i = begin * s.channels; i < end * s.channels; i++)
          put(dresidual[i], static_cast<double>(g[i]), out.add_dresidual);
    });
  });
}

}  // namespace tandem::reference
