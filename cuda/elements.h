// Kernels before and after the libraries' products and convolutions: biases, rows of another width, conversions.
#pragma once
#include "cuda/columns.h"

namespace tandem::cuda {

template <class T, int V>
struct BiasRelu {
  const float* bias;
  bool relu;
  T* y;
  std::int64_t channels;
  struct State {
    BiasRelu f;
    std::int64_t c;
    float bias[V];
    __device__ Pack<T, V> load(std::int64_t r) const { return pack_at<V>(f.y + r * f.channels + c); }
    __device__ void operator()(std::int64_t r, const Pack<T, V>& row) const {
      float v[V];
      unpack(row, v);
      for (int i = 0; i < V; i++) {
        if (f.bias) v[i] += bias[i];
        if (f.relu && v[i] < 0) v[i] = 0;  // keeps a NaN
      }
      store<V>(f.y + r * f.channels + c, v);
    }
  };
  __device__ State at(std::int64_t c) const {
    State s{*this, c, {}};
    if (bias) cuda::load<V>(bias + c, s.bias);
    return s;
  }
};

template <class T, int V>
struct FillRows {
  const T* row;
  T* y;
  std::int64_t channels;
  struct State {
    T* y;
    std::int64_t channels;
    Pack<T, V> row;
    __device__ Pack<T, V> load(std::int64_t) const { return row; }
    __device__ void operator()(std::int64_t r, const Pack<T, V>& same) const {
      *reinterpret_cast<Pack<T, V>*>(y + r * channels) = same;
    }
  };
  __device__ State at(std::int64_t c) const { return {y + c, channels, pack_at<V>(row + c)}; }
};

template <class T>
struct SetChannels {
  unsigned from_width, to_width;
  const T* from;
  T* to;
  __device__ T value(std::int64_t i) const {
    const std::int64_t row = i <= 0xffffffff ? unsigned(i) / to_width : i / to_width;
    const unsigned c = unsigned(i - row * to_width);
    return c < from_width ? from[row * from_width + c] : T(0.f);
  }
  __device__ void store(std::int64_t i, T v) const { to[i] = v; }
  __device__ void operator()(std::int64_t i) const { store(i, value(i)); }
};

template <class From, class To, int V>
struct ConvertInto {
  const From* from;
  To* to;
  bool add;
  __device__ void operator()(std::int64_t pack) const {
    float v[V], old[V] = {};
    load<V>(from + pack * V, v);
    if (add) load<V>(to + pack * V, old);
    for (int i = 0; i < V; i++) v[i] += old[i];
    store<V>(to + pack * V, v);
  }
};

// y = relu?(y + bias) in place; bias may be null. y [rows, channels].
template <class T>
void bias_relu(const Grid& grid, std::int64_t rows, std::int64_t channels, const float* bias, bool relu, T* y) {
  if (!bias && !relu) return;
  with_packs<T>(
      channels,
      [&]<int V> {
        each_column<V>(grid, rows, channels, BiasRelu<T, V>{bias, relu, y, channels});
      },
      y, bias);
}
// y[r, c] = row[c] for every row.
template <class T>
void fill_rows(const Grid& grid, std::int64_t rows, std::int64_t channels, const T* row, T* y) {
  with_packs<T>(
      channels,
      [&]<int V> {
        each_column<V>(grid, rows, channels, FillRows<T, V>{row, y, channels});
      },
      y, row);
}
// Copies rows to another width: truncated, or padded with zeros.
template <class T>
void set_channels(const Grid& grid, std::int64_t rows, std::int64_t from_width, std::int64_t to_width, const T* from,
                  T* to) {
  device_launch(grid.stream, rows * to_width, SetChannels<T>{unsigned(from_width), unsigned(to_width), from, to});
}
// to (+)= from, converted.
template <class From, class To>
void convert(const Grid& grid, std::int64_t n, const From* from, To* to, bool add) {
  using Narrow = std::conditional_t<sizeof(From) < sizeof(To), From, To>;
  with_packs<Narrow>(
      n,
      [&]<int V> {
        device_launch(grid.stream, n / V, ConvertInto<From, To, V>{from, to, add});
      },
      from, to);
}

}  // namespace tandem::cuda
