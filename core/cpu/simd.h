// Vectors of the widest register the compiler was told of: 16 floats with AVX-512, 8 with AVX, 4 with SSE. GCC and
// clang give arithmetic on them; loads and stores convert from and to bf16, so that kernels are written once for both
// types.
#pragma once
#include "core/dtype.h"

namespace tandem::cpu {

constexpr int VL = __BIGGEST_ALIGNMENT__ >= 64 ? 16 : __BIGGEST_ALIGNMENT__ >= 32 ? 8 : 4;  // floats in a register
constexpr int registers = VL == 16 ? 32 : 16;

typedef float vf __attribute__((vector_size(VL * 4), may_alias));
typedef float vf_anywhere __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef std::uint32_t vu __attribute__((vector_size(VL * 4), may_alias));
typedef std::uint16_t vh __attribute__((vector_size(VL * 2), may_alias));
typedef std::uint16_t vh_anywhere __attribute__((vector_size(VL * 2), aligned(2), may_alias));

inline vf load(const float* p) { return *reinterpret_cast<const vf_anywhere*>(p); }
inline vf load(const bf16* p) {
  vh halves = *reinterpret_cast<const vh_anywhere*>(p);
  return (vf)(__builtin_convertvector(halves, vu) << 16);
}
inline void store(float* p, vf v) { *reinterpret_cast<vf_anywhere*>(p) = v; }
// Rounds to nearest, ties to even, and keeps a NaN a NaN: bf16(float) for a whole vector.
inline void store(bf16* p, vf v) {
  vu u = (vu)v;
  vu rounded = u + 0x7fffu + ((u >> 16) & 1u);
  rounded = (u & 0x7fffffffu) > 0x7f800000u ? u | 0x400000u : rounded;
  *reinterpret_cast<vh_anywhere*>(p) = __builtin_convertvector(rounded >> 16, vh);
}
inline vf relu(vf v) { return v < 0.f ? vf{} : v; }  // a NaN stays one

inline vf broadcast(float x) { return x - vf{}; }  // not vf{} + x: that is an addition, for −0 would become +0

// A VL × VL matrix in place, rows ↔ columns: log2(VL) rounds that exchange halves, quarters, … between pairs of rows.
inline void transpose(vf* r) {
#pragma GCC unroll 4
  for (int step = 1; step < VL; step *= 2) {
    vu low{}, high{};
    for (int k = 0; k < VL; k++) {
      bool upper = k & step;
      low[k] = unsigned(upper ? VL + k - step : k);
      high[k] = unsigned(upper ? VL + k : k + step);
    }
#pragma GCC unroll 16
    for (int i = 0; i < VL; i++) {
      if (i & step) continue;
      vf a = r[i], b = r[i + step];
      r[i] = __builtin_shuffle(a, b, low);
      r[i + step] = __builtin_shuffle(a, b, high);
    }
  }
}

}  // namespace tandem::cpu
