// Squared norms of parameters and gradients: first of blocks, then of parameter ranges as sums over their blocks. Used
// with launch_sums().
#pragma once
#include <cstdint>

#include "core/hd.h"

namespace tandem {

// Two sums that are computed together, in double.
struct TwoSums {
  double a = 0, b = 0;
};

inline constexpr std::int64_t square_block = 64;  // elements; segments begin at multiples of it

// Σw² and Σg² of each block, into out[2·block] and out[2·block + 1].
template <class T>
struct SquaredNormsOfBlocks {
  std::int64_t first;
  const T *w, *g;
  T* out;
  struct alignas(16) Four {
    T v[4];
  };
  TANDEM_HD TwoSums part(std::int64_t b, int lane, int lanes) const {
    const std::int64_t begin = (first + b) * square_block, end = begin + square_block;
    T ww = 0, gg = 0;
    if (lanes == 1) {
#pragma omp simd reduction(+ : ww, gg)
      for (std::int64_t i = begin; i < end; i++) ww += w[i] * w[i], gg += g[i] * g[i];
    } else {
      for (std::int64_t i = begin + 4 * lane; i < end; i += 4 * lanes) {
        const Four x = *reinterpret_cast<const Four*>(w + i), y = *reinterpret_cast<const Four*>(g + i);
        for (int k = 0; k < 4; k++) ww += x.v[k] * x.v[k], gg += y.v[k] * y.v[k];
      }
    }
    return {double(ww), double(gg)};
  }
  TANDEM_HD void finish(std::int64_t b, const TwoSums& sum) const {
    out[2 * (first + b)] = T(sum.a);
    out[2 * (first + b) + 1] = T(sum.b);
  }
};

// Σw² and Σg² of each parameter range, from its blocks. sums[0] is the squared norm of all gradients (written by
// TotalSquaredNorm); two sums per range follow. Blocks outside [first, last) belong to another call.
template <class T>
struct SquaredNormsOfRanges {
  std::int64_t first, last;
  bool add;
  const std::int32_t* bounds;
  const T* partial;
  T* sums;
  TANDEM_HD TwoSums part(std::int64_t s, int lane, int lanes) const {
    TwoSums sum;
    const std::int64_t begin = bounds[2 * s] > first ? bounds[2 * s] : first,
                       end = bounds[2 * s + 1] < last ? bounds[2 * s + 1] : last;
    for (std::int64_t b = begin + lane; b < end; b += lanes) {
      sum.a += double(partial[2 * b]);
      sum.b += double(partial[2 * b + 1]);
    }
    return sum;
  }
  TANDEM_HD void finish(std::int64_t s, const TwoSums& sum) const {
    T* out = sums + 1 + 2 * s;
    out[0] = T(sum.a) + (add ? out[0] : T(0));
    out[1] = T(sum.b) + (add ? out[1] : T(0));
  }
};

}  // namespace tandem
