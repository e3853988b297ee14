// Batch normalisation with the addition of a residual and ReLU. Each pass touches memory once, 16 bytes at a time.
#include "cuda/columns.h"

namespace tandem::cuda {
namespace {

// ---- forward: Σ(x − k), Σ(x − k)², with k = the first row, near enough to the mean for the squares to keep their digits
template <class T, int V>
struct Moments {
  const T* x;
  std::int64_t channels;
  struct State {
    const T* x;
    std::int64_t channels;
    float k[V];
    __device__ void operator()(std::int64_t r, float (&sums)[2][V]) const {
      float v[V];
      load<V>(x + r * channels, v);
      for (int i = 0; i < V; i++) {
        const float d = v[i] - k[i];
        sums[0][i] += d;
        sums[1][i] += d * d;
      }
    }
  };
  __device__ State at(std::int64_t c) const {
    State s{x + c, channels, {}};
    load<V>(x + c, s.k);
    return s;
  }
};

// scale = gamma·inverse, offset = beta − mean·scale: the forward pass is then x·scale + offset, in both directions.
template <class T>
struct FinishForward {
  NormShape s;
  const T* x;
  const float *gamma, *beta;
  float *running_mean, *running_variance, *mean, *inverse, *scale, *offset;
  __device__ void operator()(std::int64_t c, const double (&sums)[2]) const {
    const double rows = double(s.rows), distance = sums[0] / rows, average = double(float(x[c])) + distance;
    double variance = sums[1] / rows - distance * distance;
    if (variance < 0) variance = 0;  // a NaN stays
    const float m = float(average), inv = float(1 / sqrt(variance + s.epsilon));
    mean[c] = m;
    inverse[c] = inv;
    scale[c] = gamma[c] * inv;
    offset[c] = fmaf(-m, scale[c], beta[c]);
    running_mean[c] += float(s.momentum * (average - running_mean[c]));
    running_variance[c] += float(s.momentum * (variance * (s.rows > 1 ? rows / (rows - 1) : 1) - running_variance[c]));
  }
};

struct Inference {
  double epsilon;
  const float *gamma, *beta, *mean, *variance;
  float *scale, *offset;
  __device__ void operator()(std::int64_t c) const {
    scale[c] = float(gamma[c] / sqrt(double(variance[c]) + epsilon));
    offset[c] = fmaf(-mean[c], scale[c], beta[c]);
  }
};

template <class T, int V>
struct Normalise {
  const T *x, *residual;
  const float *scale, *offset;
  bool relu;
  T* y;
  std::int64_t channels;
  __device__ void operator()(std::int64_t pack) const {
    const std::int64_t at = pack * V, c = at % channels;
    float v[V], a[V], b[V];
    load<V>(x + at, v);
    load<V>(scale + c, a);
    load<V>(offset + c, b);
    for (int i = 0; i < V; i++) v[i] = fmaf(v[i], a[i], b[i]);
    if (residual) {
      float r[V];
      load<V>(residual + at, r);
      for (int i = 0; i < V; i++) v[i] += r[i];
    }
    if (relu)
      for (int i = 0; i < V; i++) v[i] = v[i] < 0 ? 0.f : v[i];  // lets a NaN through
    store<V>(y + at, v);
  }
};

template <class T>
void normalise(const Grid& grid, const NormShape& s, const T* x, const T* residual, const float* scale,
               const float* offset, T* y) {
  with_packs<T>(
      s.channels,
      [&]<int V> {
        device_launch(grid.stream, s.rows * s.channels / V,
                      Normalise<T, V>{x, residual, scale, offset, s.relu, y, s.channels});
      },
      x, residual, y);
}

// ---- backward: d = dy, 0 where y ≤ 0; Σ d and Σ d·(x − mean) --------------------------------------------------------
template <class T>
struct Arguments {
  const T *x, *y, *dy;  // y: null, then the mask comes from x
  const float *mean, *scale, *offset;
  bool relu;
  std::int64_t channels;
};

template <class T, int V>
__device__ void masked(const Arguments<T>& a, std::int64_t at, const float (&x)[V], const float (&scale)[V],
                       const float (&offset)[V], float (&d)[V]) {
  load<V>(a.dy + at, d);
  if (!a.relu) return;
  float y[V];
  if (a.y)
    load<V>(a.y + at, y);
  else
    for (int i = 0; i < V; i++) y[i] = fmaf(x[i], scale[i], offset[i]);
  for (int i = 0; i < V; i++) d[i] = y[i] <= 0 ? 0.f : d[i];
}

template <class T, int V>
struct GradientSums {
  Arguments<T> a;
  T* keep;  // where the masked gradient is left for the second pass, or null
  struct State {
    Arguments<T> a;
    T* keep;
    std::int64_t c;
    float mean[V], scale[V], offset[V];
    __device__ void operator()(std::int64_t r, float (&sums)[2][V]) const {
      const std::int64_t at = r * a.channels + c;
      float x[V], d[V];
      load<V>(a.x + at, x);
      masked<T, V>(a, at, x, scale, offset, d);
      if (keep) store<V>(keep + at, d);
      for (int i = 0; i < V; i++) {
        sums[0][i] += d[i];
        sums[1][i] += d[i] * (x[i] - mean[i]);
      }
    }
  };
  __device__ State at(std::int64_t c) const {
    State s{a, keep, c, {}, {}, {}};
    load<V>(a.mean + c, s.mean);
    load<V>(a.scale + c, s.scale);
    load<V>(a.offset + c, s.offset);
    return s;
  }
};

struct Prepare {
  const float *gamma, *beta, *mean, *inverse;
  float *scale, *offset;
  __device__ void operator()(std::int64_t c) const {
    scale[c] = gamma[c] * inverse[c];
    offset[c] = fmaf(-mean[c], scale[c], beta[c]);
  }
};

// dx = d·scale + (x − mean)·slope + constant
struct FinishBackward {
  double rows;
  const float *scale, *inverse;
  float *slope, *constant, *dgamma, *dbeta;
  bool add_dgamma, add_dbeta;
  __device__ void operator()(std::int64_t c, const double (&sums)[2]) const {
    const double gradient = sums[1] * inverse[c];
    slope[c] = float(-double(scale[c]) * inverse[c] * gradient / rows);
    constant[c] = float(-double(scale[c]) * sums[0] / rows);
    if (dgamma) dgamma[c] = float(gradient + (add_dgamma ? dgamma[c] : 0.f));
    if (dbeta) dbeta[c] = float(sums[0] + (add_dbeta ? dbeta[c] : 0.f));
  }
};

template <class T, int V>
struct InputGradient {
  Arguments<T> a;  // dy may be the masked gradient that the first pass kept; relu is then false
  const float *slope, *constant;
  T *dx, *dresidual;  // dresidual: added to, or null
  bool add_dx;
  __device__ void operator()(std::int64_t pack) const {
    const std::int64_t at = pack * V, c = at % a.channels;
    float x[V], d[V], scale[V], offset[V], mean[V], k[V], e[V];
    load<V>(a.x + at, x);
    load<V>(a.scale + c, scale);
    load<V>(a.offset + c, offset);
    masked<T, V>(a, at, x, scale, offset, d);
    if (dresidual) {
      float r[V];
      load<V>(dresidual + at, r);
      for (int i = 0; i < V; i++) r[i] += d[i];
      store<V>(dresidual + at, r);
    }
    if (!dx) return;
    load<V>(a.mean + c, mean);
    load<V>(slope + c, k);
    load<V>(constant + c, e);
    float result[V];
    for (int i = 0; i < V; i++) result[i] = d[i] * scale[i] + ((x[i] - mean[i]) * k[i] + e[i]);
    if (add_dx) {
      float old[V];
      load<V>(dx + at, old);
      for (int i = 0; i < V; i++) result[i] += old[i];
    }
    store<V>(dx + at, result);
  }
};

}  // namespace

template <class T>
void batch_norm(const Grid& grid, const NormShape& s, const T* x, const T* residual, const float* gamma,
                const float* beta, float* running_mean, float* running_variance, T* y, float* mean, float* inverse_std,
                float* scratch) {
  float *scale = scratch, *offset = scale + s.channels, *parts = offset + s.channels;
  with_packs<T>(
      s.channels,
      [&]<int V> {
        column_sums<2, V>(
            grid, s.rows, s.channels, parts, Moments<T, V>{x, s.channels},
            FinishForward<T>{s, x, gamma, beta, running_mean, running_variance, mean, inverse_std, scale, offset});
      },
      x);
  normalise(grid, s, x, residual, scale, offset, y);
}

template <class T>
void batch_norm_inference(const Grid& grid, const NormShape& s, const T* x, const T* residual, const float* gamma,
                          const float* beta, const float* mean, const float* variance, T* y, float* scratch) {
  float *scale = scratch, *offset = scale + s.channels;
  device_launch(grid.stream, s.channels, Inference{s.epsilon, gamma, beta, mean, variance, scale, offset});
  normalise(grid, s, x, residual, scale, offset, y);
}

template <class T>
void batch_norm_again(const Grid& grid, const NormShape& s, const T* x, const T* residual, const float* gamma,
                      const float* beta, const float* mean, const float* inverse_std, T* y, float* scratch) {
  float *scale = scratch, *offset = scale + s.channels;
  device_launch(grid.stream, s.channels, Prepare{gamma, beta, mean, inverse_std, scale, offset});
  normalise(grid, s, x, residual, scale, offset, y);
}

template <class T>
void batch_norm_backward(const Grid& grid, const NormShape& s, const T* x, const T* y, const T* dy, const float* gamma,
                         const float* beta, const float* mean, const float* inverse_std, const NormOutputs<T>& out,
                         float* scratch) {
  float *scale = scratch, *offset = scale + s.channels, *slope = offset + s.channels, *constant = slope + s.channels,
        *parts = constant + s.channels;
  device_launch(grid.stream, s.channels, Prepare{gamma, beta, mean, inverse_std, scale, offset});
  Arguments<T> a{x, y, dy, mean, scale, offset, s.relu, s.channels};
  T* keep = out.add_dresidual || (!s.relu && out.dresidual == dy) ? nullptr : out.dresidual;
  with_packs<T>(
      s.channels,
      [&]<int V> {
        column_sums<2, V>(grid, s.rows, s.channels, parts, GradientSums<T, V>{a, keep},
                          FinishBackward{double(s.rows), scale, inverse_std, slope, constant, out.dgamma, out.dbeta,
                                         out.add_dgamma, out.add_dbeta});
        T* added = out.add_dresidual ? out.dresidual : nullptr;
        if (!out.dx && !added) return;
        Arguments<T> second = a;
        if (keep) second.dy = keep, second.relu = false;
        device_launch(grid.stream, s.rows * s.channels / V,
                      InputGradient<T, V>{second, slope, constant, out.dx, added, out.add_dx});
      },
      x, y, dy, out.dx, out.dresidual);
}

#define TANDEM_NORM(T)                                                                                              \
  template void batch_norm(const Grid&, const NormShape&, const T*, const T*, const float*, const float*, float*,   \
                           float*, T*, float*, float*, float*);                                                     \
  template void batch_norm_inference(const Grid&, const NormShape&, const T*, const T*, const float*, const float*, \
                                     const float*, const float*, T*, float*);                                       \
  template void batch_norm_again(const Grid&, const NormShape&, const T*, const T*, const float*, const float*,     \
                                 const float*, const float*, T*, float*);                                           \
  template void batch_norm_backward(const Grid&, const NormShape&, const T*, const T*, const T*, const float*,      \
                                    const float*, const float*, const float*, const NormOutputs<T>&, float*);
TANDEM_NORM(float)
TANDEM_NORM(bf16)
TANDEM_NORM(f16)
#undef TANDEM_NORM

}  // namespace tandem::cuda
