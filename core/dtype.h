// Element types. f32 and bf16 are for training; f64 is for the reference backend's finite differences; u8 and i32 are
// for pictures and labels; f16 is for CUDA and for files.
#pragma once
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "core/error.h"
#include "core/hd.h"

namespace tandem {

enum class DType : std::uint8_t { f32, bf16, f16, f64, u8, i32 };

// The upper half of a float: same exponent, 8 bits of precision. Arithmetic is always done in float.
struct bf16 {
  std::uint16_t bits = 0;
  bf16() = default;
  // Rounds to nearest, ties to even; a NaN stays a NaN (the quiet bit is set so that it cannot round to infinity).
  TANDEM_HD bf16(float value) {
    std::uint32_t u = std::bit_cast<std::uint32_t>(value);
    std::uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    bits = static_cast<std::uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? (u >> 16) | 0x40u : rounded);
  }
  TANDEM_HD operator float() const { return std::bit_cast<float>(std::uint32_t(bits) << 16); }
};

// IEEE's half: 5 bits of exponent (up to 65504, down to 6e-8), 11 of precision. Rounds to nearest, ties to even; a
// number beyond the largest becomes infinity, which dynamic loss scaling detects (core/step.h).
struct f16 {
  std::uint16_t bits = 0;
  f16() = default;
  TANDEM_HD f16(float value) {
#if defined(__CUDA_ARCH__)
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#else
    const std::uint32_t u = std::bit_cast<std::uint32_t>(value), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
    std::uint32_t h;
    if (a > 0x7f800000u) {
      h = 0x7e00u | ((a >> 13) & 0x1ffu);  // NaN
    } else if (a >= 0x477ff000u) {
      h = 0x7c00u;  // 65520 and more
    } else if (a >= 0x38800000u) {
      h = (a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13;
    } else {  // denormal: adding 0.5 rounds it to a multiple of 2⁻²⁴
      h = std::bit_cast<std::uint32_t>(std::bit_cast<float>(a) + 0.5f) - 0x3f000000u;
    }
    bits = static_cast<std::uint16_t>(sign | h);
#endif
  }
  TANDEM_HD operator float() const {
#if defined(__CUDA_ARCH__)
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#else
    const std::uint32_t sign = std::uint32_t{bits & 0x8000u} << 16, a = bits & 0x7fffu;
    if (a >= 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u | ((a & 0x3ffu) << 13));
    if (a >= 0x400u) return std::bit_cast<float>(sign | ((a << 13) + 0x38000000u));
    const float small = float(a) * 0x1p-24f;  // exact
    return sign ? -small : small;
#endif
  }
};

constexpr std::size_t size_of(DType t) {
  constexpr std::size_t sizes[] = {4, 2, 2, 8, 1, 4};
  return sizes[int(t)];
}
constexpr const char* name_of(DType t) { return std::array{"f32", "bf16", "f16", "f64", "u8", "i32"}[std::size_t(t)]; }

template <class T>
inline constexpr DType dtype_of = std::is_same_v<T, bf16>           ? DType::bf16
                                  : std::is_same_v<T, f16>          ? DType::f16
                                  : std::is_same_v<T, double>       ? DType::f64
                                  : std::is_same_v<T, std::uint8_t> ? DType::u8
                                  : std::is_same_v<T, std::int32_t> ? DType::i32
                                                                    : DType::f32;

// The type in which arithmetic is done: double for double, float for all narrower types.
template <class T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Calls f.template operator()<T>() with the type T among First, Rest… that `t` denotes. Throws Error, which names `op`,
// if there is none.
template <class First, class... Rest, class F>
decltype(auto) dispatch_among(DType t, const char* op, const F& f) {
  if (t == dtype_of<First>) return f.template operator()<First>();
  if constexpr (sizeof...(Rest) > 0)
    return dispatch_among<Rest...>(t, op, f);
  else
    fail(op, ": not defined for ", name_of(t), " (cast to f32 first)");
}

// The floating types: dispatch(x.dtype(), "relu", [&]<class T> { … }). f16 only in kernels that nvcc compiles.
template <class F>
decltype(auto) dispatch(DType t, const char* op, const F& f) {
#if TANDEM_TRAINS_F16
  return dispatch_among<float, bf16, f16, double>(t, op, f);
#else
  return dispatch_among<float, bf16, double>(t, op, f);
#endif
}

// The same, also for u8 and i32.
template <class F>
decltype(auto) dispatch_any(DType t, const char* op, const F& f) {
  if (t == DType::u8 || t == DType::i32) return dispatch_among<std::uint8_t, std::int32_t>(t, op, f);
  return dispatch(t, op, f);
}

// Parameters, statistics and losses, which are never narrower than f32.
template <class F>
decltype(auto) dispatch_wide(DType t, const char* op, const F& f) {
  return dispatch_among<float, double>(t, op, f);
}

}  // namespace tandem
