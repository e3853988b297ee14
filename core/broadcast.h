// Loops over the elements of two inputs that are broadcast as in NumPy: shapes are aligned at their last axes, and an
// axis of size 1 is repeated. Included by *.kernel.cpp files.
#pragma once
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

// `s` with axes of size 1 before its own.
inline Shape padded(const Shape& s, int rank) {
  Shape p;
  for (int i = s.rank(); i < rank; i++) p.append(1);
  for (std::int64_t e : s) p.append(e);
  return p;
}

// The loops over y, whose shape is the broadcast shape of a and b.
inline Loops loops_over(const Shape& y, const Shape& a, const Shape& b) {
  const Shape pa = padded(a, y.rank()), pb = padded(b, y.rank());
  Loops l;
  for (int i = 0; i < y.rank(); i++) {
    if (y[i] == 1) continue;
    const bool in_a = pa[i] != 1, in_b = pb[i] != 1;
    if (l.count && (l.a[l.count - 1] != 0) == in_a && (l.b[l.count - 1] != 0) == in_b) {
      l.size[l.count - 1] *= y[i];
    } else {
      l.size[l.count] = y[i];
      l.a[l.count] = in_a;
      l.b[l.count] = in_b;
      l.count++;
    }
  }
  if (l.count == 0) l.size[0] = l.a[0] = l.b[0] = l.count = 1;
  for (std::int64_t* strides : {l.a, l.b})
    for (std::int64_t k = l.count - 1, step = 1; k >= 0; k--) {
      if (strides[k] == 0) continue;
      strides[k] = step;
      step *= l.size[k];
    }
  return l;
}

// On a device each thread computes the position of its element. On a host each thread runs the innermost loop, whose
// strides are template arguments.
template <class Body>
struct EachElement {
  Loops loops;
  Body body;
  TANDEM_HD void operator()(std::int64_t i) const {
    const Turn t(loops, loops.count, i);
    body(i, t.p, t.q);
  }
};
template <int a_step, int b_step, class Body>
void along_rows(Backend& backend, std::int64_t n, const Loops& loops, const Body& shared_body) {
  parallel_ranges(n >= parallel_grain ? backend.threads() : 1, n, 64, [&](std::int64_t begin, std::int64_t end) {
    const Body body = shared_body;  // a private copy, as in launch()
    const int outer = loops.count - 1;
    const std::int64_t row = loops.size[outer];
    std::int64_t first = begin % row;  // a part may begin within a row
    Turn t(loops, outer, begin / row);
    for (std::int64_t i = begin; i < end; t.next(loops, outer), first = 0) {
      const std::int64_t count = std::min(row - first, end - i), p = t.p + first * a_step, q = t.q + first * b_step;
#pragma omp simd
      for (std::int64_t k = 0; k < count; k++) body(i + k, p + k * a_step, q + k * b_step);
      i += count;
    }
  });
}
// Calls body(i, p, q) for every element: i is its position in y, p in a and q in b.
template <class Body>
void launch_broadcast(Backend& backend, std::int64_t n, const Loops& loops, const Body& body) {
  if (backend.on_device()) return launch_on_device(backend, n, EachElement<Body>{loops, body});
  const bool a = loops.a[loops.count - 1], b = loops.b[loops.count - 1];
  if (a && b)
    along_rows<1, 1>(backend, n, loops, body);
  else if (a)
    along_rows<1, 0>(backend, n, loops, body);
  else
    along_rows<0, 1>(backend, n, loops, body);
}

}  // namespace tandem
