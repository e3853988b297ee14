// Group normalisation (Wu and He, 2018) of x[pictures, pixels, channels]. Per picture and group of channels, over the
// M = pixels · channels / groups elements:
//
//   mean = Σx/M    variance = Σ(x − mean)²/M    inv = 1/√(variance + ε)    x̂ = (x − mean)·inv    y = γ·x̂ + β
//
//   dβ = Σdy    dγ = Σdy·x̂ (over pictures and pixels)    h = γ·dy    dx = inv·(h − Σh/M − x̂·Σ(h·x̂)/M)
#include <cmath>

#include "core/reference/backend.h"

namespace tandem::reference {
namespace {

// f(i, c): element i of x is in channel c. Over one group of one picture.
template <class F>
void over_group(const GroupNormShape& s, std::int64_t picture, std::int64_t group, const F& f) {
  const std::int64_t first = group * s.in_group();
  for (std::int64_t p = 0; p < s.pixels; p++)
    for (std::int64_t c = first; c < first + s.in_group(); c++) f((picture * s.pixels + p) * s.channels + c, c);
}

// body(picture, group, index of the pair) for all, over threads.
template <class Body>
void for_groups(const Backend& backend, const GroupNormShape& s, const Body& body) {
  for_parts(parts_for(backend, s.pictures * s.pixels * s.channels), s.pictures * s.groups,
            [&](std::int64_t, std::int64_t begin, std::int64_t end) {
              for (std::int64_t i = begin; i < end; i++) body(i / s.groups, i % s.groups, i);
            });
}

}  // namespace

void ReferenceBackend::group_norm(const GroupNormShape& s, const Tensor& x, const Tensor& gamma, const Tensor& beta,
                                  Tensor& y, Tensor& mean, Tensor& inverse_std) {
  dispatch(x.dtype(), "group_norm", [&]<class T> {
    using P = Parameter<T>;
    const double count = static_cast<double>(s.pixels * s.in_group());
    const T* xp = x.data<T>();
    const P *gamma_p = gamma.data<P>(), *beta_p = beta.data<P>();
    T* yp = y.write<T>();
    P *mean_p = mean.write<P>(), *inverse_p = inverse_std.write<P>();
    for_groups(*this, s, [&](std::int64_t picture, std::int64_t group, std::int64_t index) {
      double sum = 0, squares = 0;
      over_group(s, picture, group, [&](std::int64_t i, std::int64_t) { sum += static_cast<double>(xp[i]); });
      const double m = sum / count;
      over_group(s, picture, group, [&](std::int64_t i, std::int64_t) {
        squares += (static_cast<double>(xp[i]) - m) * (static_cast<double>(xp[i]) - m);
      });
      const double inverse = 1 / std::sqrt(squares / count + s.epsilon);
      put(mean_p[index], m, false);
      put(inverse_p[index], inverse, false);
      over_group(s, picture, group, [&](std::int64_t i, std::int64_t c) {
        const double x_hat = (static_cast<double>(xp[i]) - m) * inverse;
        put(yp[i], static_cast<double>(gamma_p[c]) * x_hat + static_cast<double>(beta_p[c]), false);
      });
    });
  });
}

void ReferenceBackend::group_norm_backward(const GroupNormShape& s, const Tensor& x, const Tensor& dy,
                                           const Tensor& gamma, const Tensor& mean, const Tensor& inverse_std,
                                           const NormGradients& out) {
  dispatch(x.dtype(), "group_norm_backward", [&]<class T> {
    using P = Parameter<T>;
    const double count = static_cast<double>(s.pixels * s.in_group());
    const T *xp = x.data<T>(), *dyp = dy.data<T>();
    const P *gamma_p = gamma.data<P>(), *mean_p = mean.data<P>(), *inverse_p = inverse_std.data<P>();
    const auto x_hat = [&](std::int64_t i, std::int64_t index) {
      return (static_cast<double>(xp[i]) - static_cast<double>(mean_p[index])) * static_cast<double>(inverse_p[index]);
    };

    Scratch<double> sums(*this, 2 * s.channels);
    double *dbeta = sums.data(), *dgamma = sums.data() + s.channels;
    const auto pair_of = [&](std::int64_t r, std::int64_t c) { return r / s.pixels * s.groups + c / s.in_group(); };
    const std::int64_t rows = s.pictures * s.pixels;
    sum_columns(*this, rows, s.channels, dbeta,
                [&](std::int64_t r, std::int64_t c) { return static_cast<double>(dyp[r * s.channels + c]); });
    sum_columns(*this, rows, s.channels, dgamma, [&](std::int64_t r, std::int64_t c) {
      return static_cast<double>(dyp[r * s.channels + c]) * x_hat(r * s.channels + c, pair_of(r, c));
    });

    if (T* dx = out.dx ? out.dx->write<T>() : nullptr)
      for_groups(*this, s, [&](std::int64_t picture, std::int64_t group, std::int64_t index) {
        double sum = 0, product = 0;
        over_group(s, picture, group, [&](std::int64_t i, std::int64_t c) {
          const double h = static_cast<double>(gamma_p[c]) * static_cast<double>(dyp[i]);
          sum += h;
          product += h * x_hat(i, index);
        });
        over_group(s, picture, group, [&](std::int64_t i, std::int64_t c) {
          const double h = static_cast<double>(gamma_p[c]) * static_cast<double>(dyp[i]);
          put(dx[i], static_cast<double>(inverse_p[index]) * (h - sum / count - x_hat(i, index) * product / count),
              out.add_dx);
        });
      });
    if (P* to = out.dbeta ? out.dbeta->write<P>() : nullptr)
      for (std::int64_t c = 0; c < s.channels; c++) put(to[c], dbeta[c], out.add_dbeta);
    if (P* to = out.dgamma ? out.dgamma->write<P>() : nullptr)
      for (std::int64_t c = 0; c < s.channels; c++) put(to[c], dgamma[c], out.add_dgamma);
  });
}

}  // namespace tandem::reference
