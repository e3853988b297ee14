// Rows of channels: the loop that batch norm and the sums share, and partial vectors for the remaining channels.
//
// With pictures as [n, h, w, c] the last axis is contiguous, so a vector holds neighbouring channels and the loops need
// no transposition. Channel counts like 6, 10 or 17 do not fill vectors, but the memory has no gaps: several rows in
// sequence are a longer row that does. Fold chooses the shortest such row; its element j belongs to channel j mod c.
#pragma once
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <type_traits>

#include "core/cpu/simd.h"

namespace tandem::cpu {

// rows × channels viewed as folded rows of `width` elements (a multiple of a panel) and a tail shorter than one row.
struct Fold {
  static constexpr int panel = 4 * VL;  // four vectors: enough sums in flight to hide an addition's latency
  std::int64_t channels, width, rows, tail;
  std::int64_t room;  // number of values after repeat(): a folded row, or less if there is only a tail
  Fold(std::int64_t all_rows, std::int64_t channels)
      : channels(channels),
        width(std::lcm(channels, std::int64_t{panel})),
        rows(all_rows * channels / width),
        tail(all_rows * channels - rows * width),
        room(rows ? width : (std::max(tail, channels) + panel - 1) / panel * panel) {}

  // Repeats per-channel values over a folded row.
  void repeat(float* values) const {
    for (std::int64_t j = channels; j < room; j++) values[j] = values[j - channels];
  }
  // Adds up the repetitions of each channel into the first `channels` elements.
  void gather(double* sums) const {
    for (std::int64_t from = channels; from < room; from += channels)
      for (std::int64_t c = 0; c < std::min(channels, room - from); c++) sums[c] += sums[from + c];
  }
};

enum class Order { forwards, backwards };

// Calls body(whole, offset, column, rows, n) for every panel of this thread's share. A panel is part of `rows` folded
// rows, which are f.width apart; it begins at `offset`, which is column `column` of its row. whole is std::true_type
// and n = panel, except at the very end, where only the first n elements of the panel exist. Blocks of rows are small,
// so that the panels of a block are near each other in memory.
template <class Body>
void sweep(const Fold& f, int thread, int threads, Order order, const Body& body) {
  const std::int64_t begin = f.rows * thread / threads, end = f.rows * (thread + 1) / threads;
  const std::int64_t step = std::clamp<std::int64_t>(8192 / f.width, 8, 64), blocks = (end - begin + step - 1) / step;
  auto tail = [&] {
    if (thread + 1 < threads) return;
    for (std::int64_t column = 0, offset = f.rows * f.width; column < f.tail; column += Fold::panel)
      if (std::int64_t n = f.tail - column; n >= Fold::panel)
        body(std::true_type{}, offset + column, column, std::int64_t{1}, Fold::panel);
      else
        body(std::false_type{}, offset + column, column, std::int64_t{1}, int(n));
  };
  if (order == Order::backwards) tail();
  for (std::int64_t b = 0; b < blocks; b++) {
    const std::int64_t row = begin + (order == Order::backwards ? blocks - 1 - b : b) * step;
    for (std::int64_t column = 0; column < f.width; column += Fold::panel)
      body(std::true_type{}, row * f.width + column, column, std::min(step, end - row), Fold::panel);
  }
  if (order == Order::forwards) tail();
}

// A vector of elements: a whole one, or its first n elements.
template <bool whole, class T>
auto take(const T* p, int n) {
  if constexpr (whole)
    return load(p);
  else
    return load(p, n);
}
template <bool whole, class T, class V>
void put(T* p, int n, V v) {
  if constexpr (whole)
    store(p, v);
  else
    store(p, v, n);
}

// The number of elements in vector i of a panel of which the first n elements exist.
inline int within(int i, int n) { return std::clamp(n - i * VL, 0, VL); }
template <bool whole, class T>
auto read_lane(const T* p, int i, int n) {
  return take<whole>(p + (whole ? i * VL : std::min(i * VL, n)), within(i, n));
}
template <bool whole, class T, class V>
void write_lane(T* p, int i, int n, V v) {
  put<whole>(p + (whole ? i * VL : std::min(i * VL, n)), within(i, n), v);
}

// Per-channel values (a mean, a scale) for the columns of a panel, in registers.
struct Panel {
  vf lanes[4];
  explicit Panel(const float* from) {
    for (int i = 0; i < 4; i++) lanes[i] = load(from + i * VL);
  }
  vf operator[](int i) const { return lanes[i]; }
};

// total[j] = op(total[j], panel[j]): combines the float results of a block of rows with the running ones in double.
template <class Op>
void combine_panel(const Op& op, double* total, const vf (&panel)[4]) {
  float part[Fold::panel];
  for (int i = 0; i < 4; i++) store(part + i * VL, panel[i]);
#pragma omp simd
  for (int j = 0; j < Fold::panel; j++) total[j] = op(total[j], double(part[j]));
}

}  // namespace tandem::cpu
