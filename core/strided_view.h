// Strided copies: copies a strided view of one contiguous tensor to a strided view of the same shape in another.
// Operations that move elements without arithmetic (transpose, slice, pad, cat, shortcuts) are such copies. Their
// gradients are copies in the other direction. Included by *.kernel.cpp files.
#pragma once
#include "core/launch.h"

namespace tandem {

// A view into a contiguous tensor: element (i, j, …) is at position begin + i·step[0] + j·step[1] + …
struct StridedView {
  std::int64_t begin = 0, step[Shape::max_rank] = {};
};

template <class T>
struct ViewCopy {
  int rank = 1;
  std::int64_t size[Shape::max_rank] = {1};
  StridedView from, to;
  const T* x = nullptr;
  T* y = nullptr;
  // Sets p and q to the positions in x and y at which row `row` of the last axis begins.
  TANDEM_HD void place(std::int64_t row, std::int64_t& p, std::int64_t& q) const {
    p = from.begin;
    q = to.begin;
    for (int k = rank - 2; k >= 0; k--) {
      const std::int64_t i = row % size[k];
      row /= size[k];
      p += i * from.step[k];
      q += i * to.step[k];
    }
  }
};

// One index per row, so that the index is decomposed by division only once per row. Used by the threads of a host.
template <class T, bool add>
struct CopyRows : ViewCopy<T> {
  TANDEM_HD void operator()(std::int64_t row) const {
    using A = Accumulator<T>;
    std::int64_t p, q;
    this->place(row, p, q);
    const std::int64_t n = this->size[this->rank - 1], s = this->from.step[this->rank - 1],
                       t = this->to.step[this->rank - 1];
    for (std::int64_t i = 0; i < n; i++)
      this->y[q + i * t] = T(add ? A(this->y[q + i * t]) + A(this->x[p + i * s]) : A(this->x[p + i * s]));
  }
};

// One index per V neighbours of the last axis, which are copied as one pack. Used by the threads of a device, so that
// neighbouring threads access neighbouring memory.
template <class T, bool add, int V>
struct CopyPacks : ViewCopy<T> {
  struct alignas(V * sizeof(T)) Pack {
    T v[V];
  };
  TANDEM_HD void operator()(std::int64_t index) const {
    using A = Accumulator<T>;
    const std::int64_t packs = this->size[this->rank - 1] / V, at = index % packs;
    std::int64_t p, q;
    this->place(index / packs, p, q);
    const T* x = this->x + p + at * V * this->from.step[this->rank - 1];
    T* y = this->y + q + at * V * this->to.step[this->rank - 1];
    Pack pack = *reinterpret_cast<const Pack*>(x);
    if (add) {
      const Pack old = *reinterpret_cast<const Pack*>(y);
      for (int i = 0; i < V; i++) pack.v[i] = T(A(old.v[i]) + A(pack.v[i]));
    }
    *reinterpret_cast<Pack*>(y) = pack;
  }
};

// Whether packs of V elements can be copied: rows are contiguous, and rows and memory begin at multiples of a pack.
template <class T>
bool in_packs(const ViewCopy<T>& c, int V) {
  const auto aligned = [&](const T* p) {
    return reinterpret_cast<std::uintptr_t>(p) % (std::size_t(V) * sizeof(T)) == 0;
  };
  bool fits = c.from.step[c.rank - 1] == 1 && c.to.step[c.rank - 1] == 1 && c.size[c.rank - 1] % V == 0 &&
              c.from.begin % V == 0 && c.to.begin % V == 0 && aligned(c.x) && aligned(c.y);
  for (int k = 0; k + 1 < c.rank; k++) fits = fits && c.from.step[k] % V == 0 && c.to.step[k] % V == 0;
  return fits;
}

}  // namespace tandem
