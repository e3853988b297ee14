// What the convolutions borrow from their backend: memory for the length of a call, and lanes to work in.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "core/team.h"

namespace tandem::cpu {

// Memory aligned to 64 bytes, from the backend's caching allocator. Called from one thread at a time.
class Scratch {
 public:
  virtual ~Scratch() = default;
  virtual void* take(std::size_t bytes) = 0;
  virtual void give(void* block) = 0;
  virtual bool may_keep() const { return true; }  // beyond a call
};

// One block of scratch, given back at the end of the scope. `carve` cuts it into 64-byte aligned pieces, front to back.
class Block {
 public:
  Block(Scratch& scratch, std::size_t bytes)
      : scratch_(scratch), data_(static_cast<std::byte*>(scratch.take(bytes + 64))) {}
  ~Block() { scratch_.give(data_); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  std::byte* data() { return data_; }
  template <class T>
  T* carve(std::size_t count) {
    T* piece = reinterpret_cast<T*>(data_ + used_);
    used_ += (count * sizeof(T) + 63) / 64 * 64;
    return piece;
  }

 private:
  Scratch& scratch_;
  std::byte* data_;
  std::size_t used_ = 0;
};

// Σ and Σ² of a result's channels, taken while it is in registers: what batch norm would read all of it for. Each
// piece of work has its own part, so that threads do not share memory. Each part is summed relative to its first value,
// since a sum of squares about a value far from the mean loses digits.
struct Moments {
  static constexpr std::int64_t fields = 3;  // shift, Σ(y − shift), Σ(y − shift)²
  std::int64_t channels = 0;
  std::vector<std::int64_t> rows;  // of each part; empty: nothing was measured
  std::vector<float> parts;        // [part][field][channel]; keeps its memory from step to step

  void clear() { rows.clear(); }
  void begin(std::int64_t count, std::int64_t c) {
    channels = c;
    rows.assign(static_cast<std::size_t>(count), 0);
    parts.resize(static_cast<std::size_t>(count * fields * c));
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
  Moments* moments = nullptr;  // asked for; filled by those algorithms that can
};

// One state of the weights: their owner and how often it was written. A null owner is never cached.
struct WeightKey {
  const void* owner = nullptr;
  std::uint64_t count = 0;
};

// body(item, lane) for items in [0, items), dealt out as lanes become free: for items whose results do not meet.
template <class Body>
void dealt_out(int lanes, int items, const Body& body) {
  if (lanes > items) lanes = items;
  std::atomic<int> next{0};
  in_parts(lanes, [&](int lane) {
    for (int item; (item = next.fetch_add(1, std::memory_order_relaxed)) < items;) body(item, lane);
  });
}

// The share [begin, end) of n items that a lane has when they are dealt in order.
struct Share {
  int begin, end;
  Share(int n, int lanes, int lane)
      : begin(int(std::int64_t(n) * lane / lanes)), end(int(std::int64_t(n) * (lane + 1) / lanes)) {}
};

}  // namespace tandem::cpu
