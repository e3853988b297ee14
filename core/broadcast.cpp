#include "core/broadcast.h"

namespace tandem {

Shape padded(const Shape& s, int rank) {
  Shape p;
  for (int i = s.rank(); i < rank; i++) p.append(1);
  for (std::int64_t e : s) p.append(e);
  return p;
}

Loops loops_over(const Shape& y, const Shape& a, const Shape& b) {
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

void along_rows(Backend& backend, std::int64_t n, const Loops& loops, const RowBody& row) {
  parallel_ranges(n >= parallel_grain ? backend.threads() : 1, n, 64, [&](std::int64_t begin, std::int64_t end) {
    const int outer = loops.count - 1;
    const std::int64_t size = loops.size[outer];
    std::int64_t first = begin % size;  // a part may begin within a row
    Turn t(loops, outer, begin / size);
    for (std::int64_t i = begin; i < end; t.next(loops, outer), first = 0) {
      const std::int64_t count = std::min(size - first, end - i);
      row(i, t.p + first * loops.a[outer], t.q + first * loops.b[outer], count);
      i += count;
    }
  });
}

}  // namespace tandem
