// Loops over the elements of two inputs that are broadcast as in NumPy: shapes are aligned at their last axes, and an
// axis of size 1 is repeated. Included by *.kernel.cpp files.
#pragma once
#include <functional>

#include "core/launch.h"

namespace tandem {

// The broadcast strides: y as nested loops, outermost first. Neighbouring axes along which the same inputs are
// broadcast are merged into one loop: equal shapes make one loop, a bias over the last axis two. A broadcast input has
// stride 0.
struct Loops {
  int count = 0;
  std::int64_t size[Shape::max_rank] = {}, a[Shape::max_rank] = {}, b[Shape::max_rank] = {};
};

// One iteration of the first `count` loops: its indices, and its positions in a (p) and b (q).
struct Turn {
  std::int64_t at[Shape::max_rank] = {}, p = 0, q = 0;
  TANDEM_HD Turn(const Loops& l, int count, std::int64_t number) {
    for (int k = count - 1; k >= 0; k--) {
      at[k] = k ? number % l.size[k] : number;
      if (k) number /= l.size[k];
      p += at[k] * l.a[k];
      q += at[k] * l.b[k];
    }
  }
  void next(const Loops& l, int count) {  // without a division
    for (int k = count - 1; k >= 0; k--) {
      p += l.a[k];
      q += l.b[k];
      if (++at[k] < l.size[k]) return;
      p -= l.size[k] * l.a[k];
      q -= l.size[k] * l.b[k];
      at[k] = 0;
    }
  }
};

Shape padded(const Shape& s, int rank);  // `s` with axes of size 1 before its own
// The loops over y, whose shape is the broadcast shape of a and b.
Loops loops_over(const Shape& y, const Shape& a, const Shape& b);

// On a device each thread computes the position of its element.
template <class Body>
struct EachElement {
  Loops loops;
  Body body;
  TANDEM_HD void operator()(std::int64_t i) const {
    const Turn t(loops, loops.count, i);
    body(i, t.p, t.q);
  }
};

// On a host: calls row(i, p, q, count) for every piece of an innermost loop, on the backend's threads. i is the
// position of its first element in y, p in a and q in b.
using RowBody = std::function<void(std::int64_t i, std::int64_t p, std::int64_t q, std::int64_t count)>;
void along_rows(Backend& backend, std::int64_t n, const Loops& loops, const RowBody& row);

// The innermost loop, whose strides are template arguments.
template <int a_step, int b_step, class Body>
RowBody row_of(const Body& shared_body) {
  return [&shared_body](std::int64_t i, std::int64_t p, std::int64_t q, std::int64_t count) {
    const Body body = shared_body;  // a private copy, as in launch()
#pragma omp simd
    for (std::int64_t k = 0; k < count; k++) body(i + k, p + k * a_step, q + k * b_step);
  };
}

// Calls body(i, p, q) for every element: i is its position in y, p in a and q in b.
template <class Body>
void launch_broadcast(Backend& backend, std::int64_t n, const Loops& loops, const Body& body) {
  if (backend.on_device()) return launch_on_device(backend, n, EachElement<Body>{loops, body});
  const bool a = loops.a[loops.count - 1], b = loops.b[loops.count - 1];
  along_rows(backend, n, loops, a && b ? row_of<1, 1>(body) : a ? row_of<1, 0>(body) : row_of<0, 1>(body));
}

}  // namespace tandem
