// One pass of a convolution as its algorithms receive it, and how its work is shared among threads.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "core/cpu/simd.h"
#include "core/memory.h"
#include "core/shape.h"
#include "core/team.h"

namespace tandem::cpu {

// Sums of a result and of its squares per channel, computed while the result is in registers, so that batch norm need
// not read it for its statistics. Each piece of work has its own part, so that threads do not share memory. Each part
// is summed relative to its first value, since a sum of squares about a value far from the mean loses digits.
struct Moments {
  static constexpr std::int64_t fields = 3;  // shift, Σ(y − shift), Σ(y − shift)²
  std::int64_t channels = 0;
  std::vector<std::int64_t> rows;  // rows of each part; empty: nothing was measured
  std::vector<float> parts;        // [part][field][channel]; keeps its memory from step to step

  void clear() { rows.clear(); }
  void begin(std::int64_t count, std::int64_t c) {
    channels = c;
    rows.assign(std::size_t(count), 0);
    parts.resize(std::size_t(count * fields * c));
  }
  float* part(std::int64_t i) { return parts.data() + i * fields * channels; }
  std::int64_t counted() const { return std::accumulate(rows.begin(), rows.end(), std::int64_t{0}); }
  // mean and (biased) variance of every channel, always added up in the same order.
  void total(double* mean, double* variance) const;
};

// y = relu?(conv(x, w) + bias): what a forward pass does to its output while it is still in registers.
struct Epilogue {
  const float* bias = nullptr;
  bool relu = false;
  Moments* moments = nullptr;  // null: not requested; some algorithms do not fill them
};

// Identifies a state of the weights: their owner and its number of writes. With a null owner nothing is cached.
struct WeightKey {
  const void* owner = nullptr;
  std::uint64_t count = 0;
  bool operator==(const WeightKey&) const = default;
};

enum class Pass { forward, backward_data, backward_filter };

// The forward pass writes y = relu?(conv(x, w) + bias), the data gradient writes x, the filter gradient writes w; the
// other two are read. Each of x, w and y is the tensor or its gradient; parameters are always float. Pictures x[n, h,
// w, c_in], filters w[c_out, kh, kw, c_in / groups], results y[n, out_h, out_w, c_out].
template <class T>
struct ConvCall {
  Pass pass;
  ConvShape s;
  T* x;
  float* w;
  T* y;
  WeightKey key = {};      // the state of w
  bool add = false;        // adds to the gradient; false: its old contents are not read
  Epilogue epilogue = {};  // for a forward pass
};

// Calls body(first, count) for every vector of n elements; the last vector may be shorter.
template <class Body>
void in_vectors(int threads, std::int64_t n, const Body& body) {
  const int parts = n < 65536 ? 1 : threads;
  in_parts(parts, [&](int part) {
    std::int64_t i = n / VL * part / parts * VL;
    const std::int64_t end = part == parts - 1 ? n : n / VL * (part + 1) / parts * VL;
    for (; i + VL <= end; i += VL) body(i, VL);
    if (i < end) body(i, int(end - i));
  });
}

// to[i] (+)= from[i], converted to the type of `to`.
template <class From, class To>
void convert(int threads, const From* from, To* to, std::int64_t n, bool add = false) {
  in_vectors(threads, n, [=](std::int64_t i, int lanes) {
    const vf v = load(from + i, lanes);
    store(to + i, add ? load(to + i, lanes) + v : v, lanes);
  });
}

// Calls body(item, lane) for every item in [0, items). A free lane takes the next item, so the order may vary:
// the result of an item must not depend on its lane or on other items.
template <class Body>
void dealt_out(int lanes, int items, const Body& body) {
  if (lanes > items) lanes = items;
  std::atomic<int> next{0};
  in_parts(lanes, [&](int lane) {
    for (int item; (item = next.fetch_add(1, std::memory_order_relaxed)) < items;) body(item, lane);
  });
}

// The share [begin, end) of one lane, if each lane has consecutive items of n.
struct Share {
  int begin, end;
  Share(int n, int lanes, int lane)
      : begin(int(std::int64_t(n) * lane / lanes)), end(int(std::int64_t(n) * (lane + 1) / lanes)) {}
};

}  // namespace tandem::cpu
