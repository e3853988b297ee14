// Group normalisation: a block for each picture and group, the channels' sums over all of them by columns.h. Layer
// normalisation is the case of one pixel and one group.
#include "cuda/block.h"
#include "cuda/columns.h"

namespace tandem::cuda {
namespace {

// Element k of a group of a picture: where it lies, and its channel.
struct Group {
  std::int64_t base, channels, deep, first;
  __device__ Group(const GroupNormShape& s, std::int64_t pair)
      : base(pair / s.groups * s.pixels * s.channels),
        channels(s.channels),
        deep(s.in_group()),
        first(pair % s.groups * s.in_group()) {}
  __device__ std::int64_t channel(std::int64_t k) const { return first + k % deep; }
  __device__ std::int64_t at(std::int64_t k) const { return base + k / deep * channels + channel(k); }
};

template <class T>
__global__ void __launch_bounds__(256) group_norm_kernel(GroupNormShape s, const T* x, const float* gamma,
                                                         const float* beta, T* y, float* mean, float* inverse) {
  const Group g(s, blockIdx.x);
  const std::int64_t count = s.pixels * g.deep;
  float sum = 0, squares = 0;
  for (std::int64_t k = threadIdx.x; k < count; k += 256) sum += float(x[g.at(k)]);
  const float m = over_block(sum, Plus()) / float(count);
  for (std::int64_t k = threadIdx.x; k < count; k += 256) {
    const float d = float(x[g.at(k)]) - m;
    squares += d * d;
  }
  const float inv = rsqrtf(over_block(squares, Plus()) / float(count) + float(s.epsilon));
  for (std::int64_t k = threadIdx.x; k < count; k += 256) {
    const std::int64_t i = g.at(k), c = g.channel(k);
    y[i] = T((float(x[i]) - m) * inv * gamma[c] + beta[c]);
  }
  if (threadIdx.x == 0) mean[blockIdx.x] = m, inverse[blockIdx.x] = inv;
}

// dx = inverse·(h − Σh/M − x̂·Σ(h·x̂)/M), h = gamma·dy
template <class T>
__global__ void __launch_bounds__(256) group_norm_dx(GroupNormShape s, const T* x, const T* dy, const float* gamma,
                                                     const float* mean, const float* inverse, T* dx, bool add) {
  const Group g(s, blockIdx.x);
  const std::int64_t count = s.pixels * g.deep;
  const float m = mean[blockIdx.x], inv = inverse[blockIdx.x];
  float sum = 0, product = 0;
  for (std::int64_t k = threadIdx.x; k < count; k += 256) {
    const std::int64_t i = g.at(k);
    const float h = gamma[g.channel(k)] * float(dy[i]);
    sum += h;
    product += h * (float(x[i]) - m) * inv;
  }
  sum = over_block(sum, Plus()) / float(count);
  product = over_block(product, Plus()) / float(count);
  for (std::int64_t k = threadIdx.x; k < count; k += 256) {
    const std::int64_t i = g.at(k);
    const float h = gamma[g.channel(k)] * float(dy[i]), x_hat = (float(x[i]) - m) * inv;
    dx[i] = T(inv * (h - sum - x_hat * product) + (add ? float(dx[i]) : 0.f));
  }
}

// Σ dy and Σ dy·x̂ of each channel, over pictures and pixels.
template <class T>
struct ChannelSums {
  GroupNormShape s;
  const T *x, *dy;
  const float *mean, *inverse;
  struct State {
    ChannelSums f;
    std::int64_t c;
    struct Loaded {
      float x, dy;
    };
    __device__ Loaded load(std::int64_t r) const {
      const std::int64_t i = r * f.s.channels + c;
      return {float(f.x[i]), float(f.dy[i])};
    }
    __device__ void operator()(std::int64_t r, const Loaded& row, float (&sums)[2][1]) const {
      const std::int64_t pair = r / f.s.pixels * f.s.groups + c / f.s.in_group();
      sums[0][0] += row.dy;
      sums[1][0] += row.dy * (row.x - f.mean[pair]) * f.inverse[pair];
    }
  };
  __device__ State at(std::int64_t c) const { return {*this, c}; }
};
struct PutSums {
  float *dgamma, *dbeta;
  bool add_dgamma, add_dbeta;
  __device__ void operator()(std::int64_t c, const double (&sums)[2]) const {
    if (dbeta) dbeta[c] = float(sums[0] + (add_dbeta ? double(dbeta[c]) : 0));
    if (dgamma) dgamma[c] = float(sums[1] + (add_dgamma ? double(dgamma[c]) : 0));
  }
};

}  // namespace

template <class T>
void group_norm(const Grid& grid, const GroupNormShape& s, const T* x, const float* gamma, const float* beta, T* y,
                float* mean, float* inverse_std) {
  if (s.pictures == 0) return;
  start(group_norm_kernel<T>, unsigned(s.pictures * s.groups), 256, grid.stream, s, x, gamma, beta, y, mean,
        inverse_std);
}

template <class T>
void group_norm_backward(const Grid& grid, const GroupNormShape& s, const T* x, const T* dy, const float* gamma,
                         const float* mean, const float* inverse_std, const NormOutputs<T>& out, float* scratch) {
  if (s.pictures == 0) return;
  if (out.dgamma || out.dbeta)
    column_sums<2, 1>(grid, s.pictures * s.pixels, s.channels, scratch, ChannelSums<T>{s, x, dy, mean, inverse_std},
                      PutSums{out.dgamma, out.dbeta, out.add_dgamma, out.add_dbeta});
  if (!out.dx) return;
  start(group_norm_dx<T>, unsigned(s.pictures * s.groups), 256, grid.stream, s, x, dy, gamma, mean, inverse_std, out.dx,
        out.add_dx);
}

#define TANDEM_GROUP_NORM(T)                                                                                     \
  template void group_norm(const Grid&, const GroupNormShape&, const T*, const float*, const float*, T*, float*, \
                           float*);                                                                              \
  template void group_norm_backward(const Grid&, const GroupNormShape&, const T*, const T*, const float*,        \
                                    const float*, const float*, const NormOutputs<T>&, float*);
TANDEM_GROUP_NORM(float)
TANDEM_GROUP_NORM(bf16)
TANDEM_GROUP_NORM(f16)
#undef TANDEM_GROUP_NORM

}  // namespace tandem::cuda
