// Vectors of the widest register that the compiler may use: 16 floats with AVX-512, 8 with AVX, 4 with SSE. g++
// supplies the arithmetic on them (vector extensions). Loads and stores convert from and to bf16, so that kernels are
// written once for both types.
//
// load and store move whole vectors; with n ≤ VL, the first n elements: a load fills the rest with zeros, a store does
// not change the memory after them. With AVX-512 they are one or two instructions, which g++ 12 does not choose itself.
// (The maskz forms with all lanes on are used because g++ 12 warns about its own headers for the plain ones.)
#pragma once
#include <algorithm>

#include "core/dtype.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#define TANDEM_AVX512 1
#endif

namespace tandem::cpu {

constexpr int VL = __BIGGEST_ALIGNMENT__ >= 64 ? 16 : __BIGGEST_ALIGNMENT__ >= 32 ? 8 : 4;  // floats in a register
constexpr int registers = VL == 16 ? 32 : 16;

typedef float vf __attribute__((vector_size(VL * 4), may_alias));
typedef float vf_anywhere __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef std::uint32_t vu __attribute__((vector_size(VL * 4), may_alias));
typedef std::int32_t vi __attribute__((vector_size(VL * 4), may_alias));
typedef std::uint16_t vh __attribute__((vector_size(VL * 2), may_alias));
typedef std::uint16_t vh_anywhere __attribute__((vector_size(VL * 2), aligned(2), may_alias));
typedef std::uint8_t vb_anywhere __attribute__((vector_size(VL), aligned(1), may_alias));

inline vf broadcast(float x) { return x - vf{}; }  // not vf{} + x: that would be an addition, since it turns −0 into +0
inline vi broadcast(std::int32_t x) { return x + vi{}; }
inline vi lane_numbers() {
  vi i{};
  for (int k = 0; k < VL; k++) i[k] = k;
  return i;
}

inline vf load(const float* p) { return *reinterpret_cast<const vf_anywhere*>(p); }
inline void store(float* p, vf v) { *reinterpret_cast<vf_anywhere*>(p) = v; }
// Rounds to nearest, ties to even, and keeps a NaN a NaN: bf16(float) for a whole vector.
inline vh rounded(vf v) {
  vu u = (vu)v;
  vu r = u + 0x7fffu + ((u >> 16) & 1u);
  r = (u & 0x7fffffffu) > 0x7f800000u ? u | 0x400000u : r;
  return __builtin_convertvector(r >> 16, vh);
}
#if defined(TANDEM_AVX512)
inline __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1); }
inline vf widened(__m256i halves) { return (vf)((vu)_mm512_maskz_cvtepu16_epi32(0xffff, halves) << 16); }
inline __m256i narrowed(vf v) {
#if defined(__AVX512BF16__)
  return (__m256i)_mm512_cvtneps_pbh((__m512)v);  // as bf16(float), but numbers below 1e-38 become 0
#else
  return (__m256i)rounded(v);
#endif
}
inline vf load(const bf16* p) { return widened(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline vi load(const std::uint8_t* p) {
  return (vi)_mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline void store(bf16* p, vf v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrowed(v)); }
inline void store(std::uint8_t* p, vi v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)v));
}
inline vf load(const float* p, int n) { return (vf)_mm512_maskz_loadu_ps(first(n), p); }
inline vf load(const bf16* p, int n) { return widened(_mm256_maskz_loadu_epi16(first(n), p)); }
inline vi load(const std::uint8_t* p, int n) {
  return (vi)_mm512_maskz_cvtepu8_epi32(0xffff, _mm_maskz_loadu_epi8(first(n), p));
}
inline void store(float* p, vf v, int n) { _mm512_mask_storeu_ps(p, first(n), (__m512)v); }
inline void store(bf16* p, vf v, int n) { _mm256_mask_storeu_epi16(p, first(n), narrowed(v)); }
inline void store(std::uint8_t* p, vi v, int n) { _mm512_mask_cvtepi32_storeu_epi8(p, first(n), (__m512i)v); }
#else
inline vf load(const bf16* p) {
  vh halves = *reinterpret_cast<const vh_anywhere*>(p);
  return (vf)(__builtin_convertvector(halves, vu) << 16);
}
inline void store(bf16* p, vf v) { *reinterpret_cast<vh_anywhere*>(p) = rounded(v); }
inline vi load(const std::uint8_t* p) { return __builtin_convertvector(*reinterpret_cast<const vb_anywhere*>(p), vi); }
inline void store(std::uint8_t* p, vi v) {
  *reinterpret_cast<vb_anywhere*>(p) = __builtin_convertvector(v, vb_anywhere);
}
template <class T>
auto load(const T* p, int n) {
  T whole[VL] = {};
  std::copy_n(p, n, whole);
  return load(whole);
}
template <class T, class V>
void store(T* p, V v, int n) {
  T whole[VL];
  store(whole, v);
  std::copy_n(whole, n, p);
}
#endif
// Lanes [0, n) of v, the others `otherwise`.
inline vf keep(vf v, int n, vf otherwise = vf{}) { return lane_numbers() < n ? v : otherwise; }

// The lanes in which a replaces the running maximum m: a is larger, or NaN.
inline vi beats(vf a, vf m) { return (a > m) | (a != a); }
inline vf maximum(vf m, vf a) { return beats(a, m) ? a : m; }

// Combines the lanes in a fixed order, by halves.
template <class Combine>
float across(vf v, const Combine& combine) {
  for (int half = VL / 2; half > 0; half /= 2) v = combine(v, __builtin_shuffle(v, (lane_numbers() + half) & (VL - 1)));
  return v[0];
}
inline vf relu(vf v) { return v < 0.f ? vf{} : v; }  // a NaN stays a NaN

// Transposes a VL × VL matrix in place: log2(VL) rounds exchange blocks of 1, 2, 4, … lanes between pairs of rows.
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
