// Batch normalisation with the addition of a residual and ReLU; x, y and residual (which may be null) are [rows,
// channels]. Each pass touches memory once, 16 bytes at a time.
#pragma once
#include "cuda/columns.h"

namespace tandem::cuda {

// ---- forward: Σ(x − k), Σ(x − k)² with k = the first row, to avoid cancellation in the variance ---------------------
template <class T, int V>
struct Moments {
  const T* x;
  std::int64_t channels;
  struct State {
    const T* x;
    std::int64_t channels;
    float k[V];
    __device__ Pack<T, V> load(std::int64_t r) const { return pack_at<V>(x + r * channels); }
    __device__ void operator()(std::int64_t, const Pack<T, V>& row, float (&sums)[2][V]) const {
      float v[V];
      unpack(row, v);
      for (int i = 0; i < V; i++) {
        const float d = v[i] - k[i];
        sums[0][i] += d;
        sums[1][i] += d * d;
      }
    }
  };
  __device__ State at(std::int64_t c) const {
    State s{x + c, channels, {}};
    cuda::load<V>(x + c, s.k);
    return s;
  }
};

template <class T>
struct FinishForward {
  NormShape s;
  const T* x;
  float *running_mean, *running_variance, *mean, *inverse;
  __device__ void operator()(std::int64_t c, const double (&sums)[2]) const {
    const double rows = double(s.rows), distance = sums[0] / rows, average = double(float(x[c])) + distance;
    double variance = sums[1] / rows - distance * distance;
    if (variance < 0) variance = 0;  // a NaN is kept
    mean[c] = float(average);
    inverse[c] = float(1 / sqrt(variance + s.epsilon));
    running_mean[c] += float(s.momentum * (average - running_mean[c]));
    running_variance[c] += float(s.momentum * (variance * (s.rows > 1 ? rows / (rows - 1) : 1) - running_variance[c]));
  }
};

struct InverseOf {
  double epsilon;
  const float* variance;
  float* inverse;
  __device__ void operator()(std::int64_t c) const { inverse[c] = float(1 / sqrt(double(variance[c]) + epsilon)); }
};

// The forward pass as x·scale + offset, of V channels: scale = gamma·inverse, offset = beta − mean·scale.
struct Affine {
  const float *gamma, *beta, *mean, *inverse;
  template <int V>
  __device__ void at(std::int64_t c, float (&m)[V], float (&scale)[V], float (&offset)[V]) const {
    float inv[V], b[V];
    load<V>(gamma + c, scale);
    load<V>(beta + c, b);
    load<V>(mean + c, m);
    load<V>(inverse + c, inv);
    for (int i = 0; i < V; i++) {
      scale[i] *= inv[i];
      offset[i] = fmaf(-m[i], scale[i], b[i]);
    }
  }
};

template <class T, int V>
struct Normalise {
  const T *x, *residual;
  Affine affine;
  bool relu;
  T* y;
  std::int64_t channels;
  struct State {
    Normalise f;
    std::int64_t c;
    float scale[V], offset[V];
    struct Loaded {
      Pack<T, V> x, residual;
    };
    __device__ Loaded load(std::int64_t r) const {
      const std::int64_t at = r * f.channels + c;
      return {pack_at<V>(f.x + at), pack_at<V>((f.residual ? f.residual : f.x) + at)};
    }
    __device__ void operator()(std::int64_t r, const Loaded& row) const {
      float v[V];
      unpack(row.x, v);
      for (int i = 0; i < V; i++) v[i] = fmaf(v[i], scale[i], offset[i]);
      if (f.residual)
        for (int i = 0; i < V; i++) v[i] += float(row.residual.v[i]);
      if (f.relu)
        for (int i = 0; i < V; i++) v[i] = v[i] < 0 ? 0.f : v[i];  // keeps a NaN
      store<V>(f.y + r * f.channels + c, v);
    }
  };
  __device__ State at(std::int64_t c) const {
    State s{*this, c, {}, {}};
    float mean[V];
    affine.at<V>(c, mean, s.scale, s.offset);
    return s;
  }
};

template <class T>
void normalise(const Grid& grid, const NormShape& s, const T* x, const T* residual, const Affine& affine, T* y) {
  with_packs<T>(
      s.channels,
      [&]<int V> {
        each_column<V>(grid, s.rows, s.channels, Normalise<T, V>{x, residual, affine, s.relu, y, s.channels});
      },
      x, residual, y, affine.gamma, affine.beta, affine.mean, affine.inverse);
}

// ---- backward: d = dy, 0 where y ≤ 0; Σ d and Σ d·(x − mean) --------------------------------------------------------
template <class T>
struct Arguments {
  const T *x, *y, *dy;  // if y is null, the mask comes from x
  Affine affine;
  bool relu;
  std::int64_t channels;
};

// A row of x and dy, and of y if the mask comes from it.
template <class T, int V>
struct GradientRow {
  Pack<T, V> x, dy, y;
  __device__ GradientRow(const Arguments<T>& a, std::int64_t at)
      : x(pack_at<V>(a.x + at)), dy(pack_at<V>(a.dy + at)), y(pack_at<V>((a.relu && a.y ? a.y : a.x) + at)) {}
  __device__ void masked(const Arguments<T>& a, const float (&scale)[V], const float (&offset)[V],
                         float (&d)[V]) const {
    unpack(dy, d);
    if (!a.relu) return;
    for (int i = 0; i < V; i++) {
      const float out = a.y ? float(y.v[i]) : fmaf(float(x.v[i]), scale[i], offset[i]);
      if (out <= 0) d[i] = 0;
    }
  }
};

template <class T, int V>
struct GradientSums {
  Arguments<T> a;
  T* keep;  // receives the masked gradient for the second pass; may be null
  struct State {
    Arguments<T> a;
    T* keep;
    std::int64_t c;
    float mean[V], scale[V], offset[V];
    __device__ GradientRow<T, V> load(std::int64_t r) const { return {a, r * a.channels + c}; }
    __device__ void operator()(std::int64_t r, const GradientRow<T, V>& row, float (&sums)[2][V]) const {
      float d[V];
      row.masked(a, scale, offset, d);
      if (keep) store<V>(keep + r * a.channels + c, d);
      for (int i = 0; i < V; i++) {
        sums[0][i] += d[i];
        sums[1][i] += d[i] * (float(row.x.v[i]) - mean[i]);
      }
    }
  };
  __device__ State at(std::int64_t c) const {
    State s{a, keep, c, {}, {}, {}};
    a.affine.template at<V>(c, s.mean, s.scale, s.offset);
    return s;
  }
};

// dx = d·scale + (x − mean)·slope + constant
struct FinishBackward {
  double rows;
  const float *gamma, *inverse;
  float *slope, *constant, *dgamma, *dbeta;
  bool add_dgamma, add_dbeta;
  __device__ void operator()(std::int64_t c, const double (&sums)[2]) const {
    const double gradient = sums[1] * inverse[c];
    const float scale = gamma[c] * inverse[c];
    slope[c] = float(-double(scale) * inverse[c] * gradient / rows);
    constant[c] = float(-double(scale) * sums[0] / rows);
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
  struct State {
    InputGradient f;
    std::int64_t c;
    float mean[V], scale[V], offset[V], slope[V], constant[V];
    __device__ GradientRow<T, V> load(std::int64_t r) const { return {f.a, r * f.a.channels + c}; }
    __device__ void operator()(std::int64_t r, const GradientRow<T, V>& row) const {
      const std::int64_t at = r * f.a.channels + c;
      float x[V], d[V];
      unpack(row.x, x);
      row.masked(f.a, scale, offset, d);
      if (f.dresidual) {
        float sum[V];
        cuda::load<V>(f.dresidual + at, sum);
        for (int i = 0; i < V; i++) sum[i] += d[i];
        store<V>(f.dresidual + at, sum);
      }
      if (!f.dx) return;
      float result[V];
      for (int i = 0; i < V; i++) result[i] = d[i] * scale[i] + ((x[i] - mean[i]) * slope[i] + constant[i]);
      if (f.add_dx) {
        float old[V];
        cuda::load<V>(f.dx + at, old);
        for (int i = 0; i < V; i++) result[i] += old[i];
      }
      store<V>(f.dx + at, result);
    }
  };
  __device__ State at(std::int64_t c) const {
    State s{*this, c, {}, {}, {}, {}, {}};
    a.affine.template at<V>(c, s.mean, s.scale, s.offset);
    load<V>(slope + c, s.slope);
    load<V>(constant + c, s.constant);
    return s;
  }
};

// scratch: column_scratch(2, channels) + 2·channels floats, here and below.
template <class T>
void batch_norm(const Grid& grid, const NormShape& s, const T* x, const T* residual, const float* gamma,
                const float* beta, float* running_mean, float* running_variance, T* y, float* mean, float* inverse_std,
                float* scratch) {
  if (s.rows == 0) return;
  with_packs<T>(
      s.channels,
      [&]<int V> {
        column_sums<2, V>(grid, s.rows, s.channels, scratch, Moments<T, V>{x, s.channels},
                          FinishForward<T>{s, x, running_mean, running_variance, mean, inverse_std});
      },
      x);
  normalise(grid, s, x, residual, {gamma, beta, mean, inverse_std}, y);
}

template <class T>
void batch_norm_inference(const Grid& grid, const NormShape& s, const T* x, const T* residual, const float* gamma,
                          const float* beta, const float* mean, const float* variance, T* y, float* scratch) {
  device_launch(grid.stream, s.channels, InverseOf{s.epsilon, variance, scratch});
  normalise(grid, s, x, residual, {gamma, beta, mean, scratch}, y);
}

// Computes the y of batch_norm from the statistics that it stored.
template <class T>
void batch_norm_again(const Grid& grid, const NormShape& s, const T* x, const T* residual, const float* gamma,
                      const float* beta, const float* mean, const float* inverse_std, T* y) {
  normalise(grid, s, x, residual, {gamma, beta, mean, inverse_std}, y);
}

template <class T>
using NormOutputs = tandem::NormOutputs<T, float>;
// y may be null: the mask is then computed from x again. It is given for a ReLU after a residual.
template <class T>
void batch_norm_backward(const Grid& grid, const NormShape& s, const T* x, const T* y, const T* dy, const float* gamma,
                         const float* beta, const float* mean, const float* inverse_std, const NormOutputs<T>& out,
                         float* scratch) {
  float *parts = scratch, *slope = parts + column_scratch(2, s.channels), *constant = slope + s.channels;
  Arguments<T> a{x, y, dy, {gamma, beta, mean, inverse_std}, s.relu, s.channels};
  T* keep = out.add_dresidual || (!s.relu && out.dresidual == dy) ? nullptr : out.dresidual;
  with_packs<T>(
      s.channels,
      [&]<int V> {
        column_sums<2, V>(grid, s.rows, s.channels, parts, GradientSums<T, V>{a, keep},
                          FinishBackward{double(s.rows), gamma, inverse_std, slope, constant, out.dgamma, out.dbeta,
                                         out.add_dgamma, out.add_dbeta});
        T* added = out.add_dresidual ? out.dresidual : nullptr;
        if (!out.dx && !added) return;
        Arguments<T> second = a;
        if (keep) {
          second.dy = keep;
          second.relu = false;
        }
        each_column<V>(grid, s.rows, s.channels,
                       InputGradient<T, V>{second, slope, constant, out.dx, added, out.add_dx});
      },
      x, y, dy, out.dx, out.dresidual, gamma, beta, mean, inverse_std, slope, constant);
}

}  // namespace tandem::cuda
