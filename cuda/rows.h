// Sums along axes and cross-entropy: a tensor as rows.
#pragma once
#include "cuda/block.h"
#include "cuda/columns.h"

namespace tandem::cuda {

// ---- sums -----------------------------------------------------------------------------------------------------------
template <class T, int V>
struct Values {
  const T* x;
  std::int64_t channels;
  struct State {
    const T* x;
    std::int64_t channels;
    __device__ Pack<T, V> load(std::int64_t r) const { return pack_at<V>(x + r * channels); }
    __device__ void operator()(std::int64_t, const Pack<T, V>& row, float (&sums)[1][V]) const {
      for (int i = 0; i < V; i++) sums[0][i] += float(row.v[i]);
    }
  };
  __device__ State at(std::int64_t c) const { return {x + c, channels}; }
};

template <class T>
struct PutSum {
  T* to;
  bool add;
  __device__ void operator()(std::int64_t c, const double (&sums)[1]) const {
    to[c] = T(float(sums[0] + (add ? double(float(to[c])) : 0)));
  }
};

struct Larger {  // a NaN is larger than any number
  using Value = float;
  template <class A>
  __device__ A operator()(A a, A b) const {
    return a >= b || a != a ? a : b;
  }
};

struct Sum : Plus {
  using Value = double;
};
// The initial value of a reduction.
__host__ __device__ inline double beginning(Sum) { return 0; }
__host__ __device__ inline float beginning(Larger) { return -INFINITY; }

// One block for each row of `middle` neighbouring elements.
template <class T, class Op>
__global__ void __launch_bounds__(256) reduce_rows(Op op, std::int64_t middle, const T* x, T* y, bool add) {
  using A = typename Op::Value;
  const T* row = x + blockIdx.x * middle;
  A mine = beginning(op);
  for (std::int64_t k = threadIdx.x; k < middle; k += 256) mine = op(mine, A(float(row[k])));
  const A all = over_block(mine, op);
  if (threadIdx.x == 0) y[blockIdx.x] = T(float(all + (add ? A(float(y[blockIdx.x])) : A(0))));
}

// One thread for each result; neighbouring threads read neighbouring elements.
template <class T, class Op>
struct ReduceMiddle {
  Op op;
  std::int64_t middle, inner;
  const T* x;
  T* y;
  bool add;
  __device__ void operator()(std::int64_t i) const {
    using A = typename Op::Value;
    const T* from = x + i / inner * middle * inner + i % inner;
    A all = beginning(op);
    for (std::int64_t k = 0; k < middle; k++) all = op(all, A(float(from[k * inner])));
    y[i] = T(float(all + (add ? A(float(y[i])) : A(0))));
  }
};

template <class T, int V>
__global__ void __launch_bounds__(256) square_parts(std::int64_t packs, const T* x, float* parts) {
  float sum = 0;
  for (std::int64_t i = blockIdx.x * std::int64_t{256} + threadIdx.x; i < packs; i += gridDim.x * std::int64_t{256}) {
    float v[V];
    load<V>(x + i * V, v);
    for (int k = 0; k < V; k++) sum += v[k] * v[k];
  }
  const float all = over_block(sum, Plus());
  if (threadIdx.x == 0) parts[blockIdx.x] = all;
}
static __global__ void __launch_bounds__(256) square_total(const float* parts, int count, float* y, bool add) {
  double sum = 0;
  for (int i = threadIdx.x; i < count; i += 256) sum += double(parts[i]);
  const double all = over_block(sum, Plus());
  if (threadIdx.x == 0) *y = float(all + (add ? double(*y) : 0));
}

// ---- cross-entropy: a warp for each row -----------------------------------------------------------------------------
__device__ inline float warp_sum(float v) {
  for (int half = 16; half > 0; half /= 2) v += __shfl_xor_sync(~0u, v, half);
  return v;
}

struct Row {  // log p_c = (x_c − largest) − log Σ exp(x − largest)
  float largest = -INFINITY, log_sum;
  template <class T>
  __device__ Row(const T* x, std::int64_t n) {
    for (std::int64_t c = threadIdx.x; c < n; c += 32) largest = fmaxf(largest, float(x[c]));
    for (int half = 16; half > 0; half /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, half));
    float sum = 0;
    for (std::int64_t c = threadIdx.x; c < n; c += 32) sum += expf(float(x[c]) - largest);
    log_sum = logf(warp_sum(sum));
  }
  __device__ float log_p(float x) const { return (x - largest) - log_sum; }
};

// −Σ_c q_c·log p_c with q = (1 − ε)·onehot + ε/classes, and whether the label has the first of the largest logits.
template <class T>
__global__ void cross_entropy_rows(std::int64_t rows, std::int64_t n, const T* x, const std::int32_t* labels,
                                   float smoothing, float* probabilities, float* losses, float* hits) {
  const std::int64_t r = blockIdx.x * std::int64_t{8} + threadIdx.y;
  if (r >= rows) return;
  const T* from = x + r * n;
  const Row row(from, n);
  const std::int32_t label = labels[r];
  const bool valid = label >= 0 && label < n;
  const float mine = valid ? float(from[label]) : NAN;
  float sum = 0;
  bool beaten = !valid;
  for (std::int64_t c = threadIdx.x; c < n; c += 32) {
    const float v = float(from[c]), log_p = row.log_p(v);
    sum += log_p;
    probabilities[r * n + c] = expf(log_p);
    if (c < label ? !(v < mine) : !(v <= mine)) beaten = true;
  }
  sum = warp_sum(sum);
  beaten = __any_sync(~0u, beaten);
  if (threadIdx.x > 0) return;
  float loss = -(1 - smoothing) * row.log_p(mine);
  if (smoothing > 0) loss -= smoothing / float(n) * sum;  // not 0·∞ for a logit of −∞
  losses[r] = loss;
  hits[r] = beaten ? 0 : 1;
}
static __global__ void __launch_bounds__(256)
    cross_entropy_total(std::int64_t rows, const float* losses, const float* hits, float* loss, std::int32_t* correct) {
  double sum = 0;
  for (std::int64_t r = threadIdx.x; r < rows; r += 256) sum += double(losses[r]);
  const double all = over_block(sum, Plus());
  int right = 0;
  for (std::int64_t r = threadIdx.x; r < rows; r += 256) right += hits[r] > 0;
  const int all_right = over_block(right, Plus());
  if (threadIdx.x > 0) return;
  *loss = float(all / double(rows));
  if (correct) *correct += all_right;
}

template <class T>
struct CrossEntropyBackward {  // dx = dloss·(p − q)/rows
  const float* p;
  const std::int32_t* labels;
  float smoothing;
  std::int64_t rows, n;
  const float* dloss;
  T* dx;
  bool add;
  __device__ void operator()(std::int64_t i) const {
    const float q = (i % n == labels[i / n] ? 1 - smoothing : 0.f) + smoothing / float(n);
    dx[i] = T(*dloss / float(rows) * (p[i] - q) + (add ? float(dx[i]) : 0.f));
  }
};

inline dim3 warps() { return dim3(32, 8); }
inline unsigned blocks_of_rows(std::int64_t rows) { return unsigned((rows + 7) / 8); }

// scratch: column_scratch(1, channels).
template <class T>
void sum_rows(const Grid& grid, std::int64_t rows, std::int64_t channels, const T* dy, float* db, bool add,
              float* scratch) {
  with_packs<T>(
      channels,
      [&]<int V> {
        column_sums<1, V>(grid, rows, channels, scratch, Values<T, V>{dy, channels}, PutSum<float>{db, add});
      },
      dy);
}

template <class T>
void reduce(const Grid& grid, Reduction op, std::int64_t outer, std::int64_t middle, std::int64_t inner, const T* x,
            T* y, bool add) {
  if (outer * inner == 0) return;
  auto run = [&]<class Op>(Op combine) {
    if (inner > 1 || middle < 64)
      return device_launch(grid.stream, outer * inner, ReduceMiddle<T, Op>{combine, middle, inner, x, y, add});
    start(reduce_rows<T, Op>, unsigned(outer), 256, grid.stream, combine, middle, x, y, add);
  };
  if (op == Reduction::sum)
    run(Sum());
  else
    run(Larger());
}

// scratch: most_parts floats.
template <class T>
void squared_norm(const Grid& grid, std::int64_t n, const T* x, float* y, bool add, float* scratch) {
  const int blocks = int(std::clamp<std::int64_t>((n + 2047) / 2048, 1, std::min(8 * grid.processors, most_parts)));
  with_packs<T>(
      n, [&]<int V> { start(square_parts<T, V>, unsigned(blocks), 256, grid.stream, n / V, x, scratch); }, x);
  start(square_total, 1, 256, grid.stream, scratch, blocks, y, add);
}

// A label outside [0, classes) makes the loss NaN: the device cannot throw. correct may be null. scratch: 2·rows
// floats.
template <class T>
void cross_entropy(const Grid& grid, std::int64_t rows, std::int64_t classes, const T* x, const std::int32_t* labels,
                   double smoothing, float* loss, float* probabilities, std::int32_t* correct, float* scratch) {
  if (rows > 0)
    start(cross_entropy_rows<T>, blocks_of_rows(rows), warps(), grid.stream, rows, classes, x, labels, float(smoothing),
          probabilities, scratch, scratch + rows);
  start(cross_entropy_total, 1, 256, grid.stream, rows, scratch, scratch + rows, loss, correct);
}
template <class T>
void cross_entropy_backward(const Grid& grid, std::int64_t rows, std::int64_t classes, const float* probabilities,
                            const std::int32_t* labels, double smoothing, const float* dloss, T* dx, bool add) {
  device_launch(grid.stream, rows * classes,
                CrossEntropyBackward<T>{probabilities, labels, float(smoothing), rows, classes, dloss, dx, add});
}

}  // namespace tandem::cuda
