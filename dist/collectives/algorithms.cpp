#include "dist/collectives/algorithms.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace tandem {
namespace {

Piece piece(const Cuts& cuts, int i) { return {cuts[std::size_t(i)], cuts[std::size_t(i) + 1]}; }
int around(int i, int n) { return ((i % n) + n) % n; }

// ---- ring and direct ------------------------------------------------------------------------------------------------
// Each piece passes once around the ring. With `reduce` the sum of piece p begins at rank p + 1 and ends at its owner
// p; without, a copy of it begins at its owner.
void ring(Steps& s, int rank, int n, const Cuts& cuts, bool reduce) {
  const int first = reduce ? 1 : 0;
  for (int k = first; k < first + n - 1; k++)
    s.list.push_back({.to = around(rank + 1, n),
                      .out = piece(cuts, around(rank - k, n)),
                      .from = around(rank - 1, n),
                      .in = piece(cuts, around(rank - k - 1, n)),
                      .combine = reduce});
}

void direct_reduce(Steps& s, int rank, int n, const Cuts& cuts) {
  for (int k = 1; k < n; k++)
    s.list.push_back({.to = around(rank + k, n),
                      .out = piece(cuts, around(rank + k, n)),
                      .from = around(rank - k, n),
                      .in = piece(cuts, rank),
                      .combine = true});
  s.wide = piece(cuts, rank);
  s.wide_steps = s.list.size();
}

// ---- doubling and halving -------------------------------------------------------------------------------------------
// Both need a power of two. The ranks beyond the largest power of two in n first send their elements to a partner, and
// last receive the result from it.
template <class Inner>
void folded(Steps& s, int rank, int n, std::int64_t count, const Inner& inner) {
  const int core = int(std::bit_floor(unsigned(n)));
  const Piece all{0, count};
  if (rank >= core) {
    s.list.push_back({.to = rank - core, .out = all});
    s.list.push_back({.from = rank - core, .in = all});
    return;
  }
  const bool has_partner = rank + core < n;
  if (has_partner) s.list.push_back({.from = rank + core, .in = all, .combine = true});
  inner(core);
  if (has_partner) s.list.push_back({.to = rank + core, .out = all});
}

void doubling(Steps& s, int rank, int n, std::int64_t count) {
  folded(s, rank, n, count, [&](int core) {
    for (int distance = 1; distance < core; distance *= 2)
      s.list.push_back(
          {.to = rank ^ distance, .out = {0, count}, .from = rank ^ distance, .in = {0, count}, .combine = true});
  });
}

void halving(Steps& s, int rank, int n, std::int64_t count) {
  folded(s, rank, n, count, [&](int core) {
    std::vector<Step> back;
    Piece mine{0, count};
    for (int distance = core / 2; distance > 0; distance /= 2) {
      const std::int64_t middle = mine.begin + mine.length() / 2;
      Piece keep{mine.begin, middle}, give{middle, mine.end};
      if (rank & distance) std::swap(keep, give);
      s.list.push_back({.to = rank ^ distance, .out = give, .from = rank ^ distance, .in = keep, .combine = true});
      back.push_back({.to = rank ^ distance, .out = keep, .from = rank ^ distance, .in = give});
      mine = keep;
    }
    s.list.insert(s.list.end(), back.rbegin(), back.rend());
  });
}

// ---- trees ----------------------------------------------------------------------------------------------------------
// In a binomial tree, counted from the root, v receives from v without its lowest bit. Then it sends to v + 1, v + 2,
// v + 4 … below that bit, the farthest first. part(v, width): the piece for the subtree [v, v + width).
template <class Part>
void down_the_tree(Steps& s, int rank, int n, int root, const Part& part) {
  const int v = around(rank - root, n);
  const int low = v == 0 ? int(std::bit_ceil(unsigned(n))) : v & -v;
  if (v != 0) s.list.push_back({.from = around(v - low + root, n), .in = part(v, std::min(low, n - v))});
  for (int d = low / 2; d > 0; d /= 2)
    if (v + d < n) s.list.push_back({.to = around(v + d + root, n), .out = part(v + d, std::min(d, n - v - d))});
}

[[noreturn]] void unfit(Algorithm algorithm, const char* what) {
  fail("the algorithm ", name_of(algorithm), " is not one for ", what);
}

}  // namespace

const char* name_of(Algorithm a) {
  constexpr const char* names[] = {"doubling", "halving", "ring", "direct", "tree", "scatter-gather"};
  return names[int(a)];
}

Steps all_reduce_steps(Algorithm algorithm, int rank, int n, std::int64_t count) {
  Steps s;
  const Cuts cuts = even_cuts(count, n);
  switch (algorithm) {
    case Algorithm::doubling: doubling(s, rank, n, count); break;
    case Algorithm::halving: halving(s, rank, n, count); break;
    case Algorithm::ring:
      ring(s, rank, n, cuts, true);
      ring(s, rank, n, cuts, false);
      break;
    case Algorithm::direct:
      direct_reduce(s, rank, n, cuts);
      ring(s, rank, n, cuts, false);
      break;
    default: unfit(algorithm, "all_reduce");
  }
  return s;
}

Steps reduce_scatter_steps(Algorithm algorithm, int rank, int n, const Cuts& cuts) {
  Steps s;
  if (algorithm == Algorithm::ring)
    ring(s, rank, n, cuts, true);
  else if (algorithm == Algorithm::direct)
    direct_reduce(s, rank, n, cuts);
  else
    unfit(algorithm, "reduce_scatter");
  return s;
}

Steps all_gather_steps(int rank, int n, const Cuts& cuts) {
  Steps s;
  ring(s, rank, n, cuts, false);
  return s;
}

Steps broadcast_steps(Algorithm algorithm, int rank, int n, std::int64_t count, int root) {
  Steps s;
  if (algorithm == Algorithm::tree) {
    down_the_tree(s, rank, n, root, [&](int, int) { return Piece{0, count}; });
  } else if (algorithm == Algorithm::scatter_gather) {
    const Cuts cuts = even_cuts(count, n);  // piece v belongs to the v-th rank after the root
    down_the_tree(s, rank, n, root, [&](int v, int width) {
      return Piece{cuts[std::size_t(v)], cuts[std::size_t(v + width)]};
    });
    Steps pieces;
    ring(pieces, around(rank - root, n), n, cuts, false);
    for (Step& step : pieces.list) {
      step.to = around(step.to + root, n);
      step.from = around(step.from + root, n);
      s.list.push_back(step);
    }
  } else {
    unfit(algorithm, "broadcast");
  }
  return s;
}

// Dissemination: after log2 n steps every rank has received a message, directly or through others, from all.
Steps barrier_steps(int rank, int n) {
  Steps s;
  for (int distance = 1; distance < n; distance *= 2)
    s.list.push_back({.to = around(rank + distance, n), .from = around(rank - distance, n)});
  return s;
}

Algorithm choose(const std::vector<Choice>& rows, std::size_t bytes) {
  for (const Choice& row : rows)
    if (bytes <= row.up_to) return row.algorithm;
  return rows.back().algorithm;
}

// ---- arithmetic -----------------------------------------------------------------------------------------------------
namespace {

// Commutative to the last bit, so that two ranks that exchange get the same result. Of +0 and −0, +0 is larger.
template <class T>
T larger(T a, T b) {
  if (a != a || b != b) return a + b;
  if (a == b) return std::signbit(a) ? b : a;
  return a < b ? b : a;
}

template <class A, class B>
void each(Combine combine, A* into, const B* from, std::int64_t n) {
  using Wide = Accumulator<A>;
  if (combine == Combine::sum) {
#pragma omp simd
    for (std::int64_t i = 0; i < n; i++) into[i] = A(Wide(into[i]) + Wide(from[i]));
  } else {
    for (std::int64_t i = 0; i < n; i++) into[i] = A(larger(Wide(into[i]), Wide(from[i])));
  }
}

}  // namespace

void combine_elements(Combine combine, DType dtype, void* into, const void* from, std::int64_t count) {
  dispatch(dtype, "reduction",
           [&]<class T> { each(combine, static_cast<T*>(into), static_cast<const T*>(from), count); });
}

void narrow(bf16* into, const float* from, std::int64_t count) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; i++) into[i] = bf16(from[i]);
}
void widen(float* into, const bf16* from, std::int64_t count) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; i++) into[i] = from[i];
}

void combine_wide(Combine combine, float* into, const bf16* from, std::int64_t count) {
  each(combine, into, from, count);
}

}  // namespace tandem
