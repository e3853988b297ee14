// Element types. f32 and bf16 train; f64 exists for the reference backend's finite differences; u8 and i32 carry
// pictures and labels; f16 is for CUDA and for files.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>

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
  TANDEM_HD operator float() const { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }
};

constexpr std::size_t size_of(DType t) {
  switch (t) {
    case DType::f32: case DType::i32: return 4;
    case DType::bf16: case DType::f16: return 2;
    case DType::f64: return 8;
    case DType::u8: return 1;
  }
  return 0;
}

constexpr const char* name_of(DType t) {
  switch (t) {
    case DType::f32: return "f32";
    case DType::bf16: return "bf16";
    case DType::f16: return "f16";
    case DType::f64: return "f64";
    case DType::u8: return "u8";
    case DType::i32: return "i32";
  }
  return "?";
}

template <class T> inline constexpr DType dtype_of = DType::f32;
template <> inline constexpr DType dtype_of<bf16> = DType::bf16;
template <> inline constexpr DType dtype_of<double> = DType::f64;
template <> inline constexpr DType dtype_of<std::uint8_t> = DType::u8;
template <> inline constexpr DType dtype_of<std::int32_t> = DType::i32;

// The type arithmetic is done in: double for double, float for everything narrower.
template <class T> struct AccumulatorOf { using type = float; };
template <> struct AccumulatorOf<double> { using type = double; };
template <class T> using Accumulator = typename AccumulatorOf<T>::type;

// Calls f.template operator()<T>() with the C++ type behind a floating dtype: dispatch(x.dtype(), "relu", [&]<class T> { … });
template <class F>
decltype(auto) dispatch(DType t, const char* op, F&& f) {
  switch (t) {
    case DType::f32: return f.template operator()<float>();
    case DType::bf16: return f.template operator()<bf16>();
    case DType::f64: return f.template operator()<double>();
    default: fail(op, ": not defined for ", name_of(t), " (cast to f32 first)");
  }
}

// The same for parameters, statistics and losses, which are never narrower than f32.
template <class F>
decltype(auto) dispatch_wide(DType t, const char* op, F&& f) {
  switch (t) {
    case DType::f32: return f.template operator()<float>();
    case DType::f64: return f.template operator()<double>();
    default: fail(op, ": parameters are f32 (f64 on the reference backend), not ", name_of(t));
  }
}

}  // namespace tandem
