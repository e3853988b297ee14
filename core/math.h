// exp, tanh and the normal distribution in a form that compilers vectorise (those of the C library are function calls).
// float: within 2 ulp of the true value for exp, 4e-7 absolute for tanh. double uses the C library.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

#include "core/hd.h"

namespace tandem {

// 2^n · 2^f with n = round(x·log2 e) and a degree-6 polynomial for e^r, |r| ≤ ln2 / 2. NaN stays NaN; overflow is
// infinity.
TANDEM_HD inline float exponential(float x) {
  float c = x < -104.f ? -104.f : x > 89.f ? 89.f : x;
  float n = c * 1.44269504f;
  n = (n + 12582912.f) - 12582912.f;  // rounds to the nearest integer
  float r = c - n * 0.693359375f;     // ln 2 in two pieces, so that the product is exact
  r = r + n * 2.12194440e-4f;
  float p = 1.f / 720;
  p = p * r + 1.f / 120;
  p = p * r + 1.f / 24;
  p = p * r + 1.f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.f;
  p = p * r + 1.f;
  // 2^n in two factors, so that denormals and infinity are correct
  std::int32_t k = std::int32_t(n), half = k >> 1;
  float result = p * std::bit_cast<float>((half + 127) << 23) * std::bit_cast<float>((k - half + 127) << 23);
  return x == x ? result : x;
}
TANDEM_HD inline double exponential(double x) { return std::exp(x); }

// e^x − 1, with a relative error of 2e-7 also near zero, where it uses the series.
TANDEM_HD inline float exponential_minus_1(float x) {
  float near =
      x * (1.f + x * (1.f / 2) *
                     (1.f + x * (1.f / 3) *
                                (1.f + x * (1.f / 4) *
                                           (1.f + x * (1.f / 5) * (1.f + x * (1.f / 6) * (1.f + x * (1.f / 7)))))));
  float far = exponential(x) - 1.f;
  return x > -0.35f && x < 0.35f ? near : far;
}
TANDEM_HD inline double exponential_minus_1(double x) { return std::expm1(x); }

TANDEM_HD inline float hyperbolic_tangent(float x) {
  float a = x < 0 ? -x : x;
  float e = exponential(-2.f * a);
  float far = (1.f - e) / (1.f + e);
  float s = x * x;  // near zero the quotient loses digits, so the odd series is used
  float near = x * (1.f + s * (-1.f / 3 + s * (2.f / 15 + s * (-17.f / 315 + s * (62.f / 2835)))));
  return a < 0.3f ? near : x < 0 ? -far : far;
}
TANDEM_HD inline double hyperbolic_tangent(double x) { return std::tanh(x); }

// Φ(x), the probability that a standard normal variable is below x: erfc(−x/√2)/2. Uses erfc of Numerical Recipes,
// whose relative error stays small in the tail (1.2e-7 in exact arithmetic, about 1e-6 in float), where 1 + erf would
// lose its digits.
TANDEM_HD inline float normal_distribution(float x) {
  float z = (x < 0 ? -x : x) * 0.70710678f, t = 1.f / (1.f + 0.5f * z);
  float p = 0.17087277f;
  p = p * t - 0.82215223f;
  p = p * t + 1.48851587f;
  p = p * t - 1.13520398f;
  p = p * t + 0.27886807f;
  p = p * t - 0.18628806f;
  p = p * t + 0.09678418f;
  p = p * t + 0.37409196f;
  p = p * t + 1.00002368f;
  p = p * t - 1.26551223f;
  float tail = 0.5f * t * exponential(-z * z) * exponential(p);
  return x < 0 ? tail : 1.f - tail;
}
TANDEM_HD inline double normal_distribution(double x) { return 0.5 * std::erfc(-0.70710678118654752 * x); }

// a·b + c, rounded once if the processor has a fused multiply-add, else twice. Used where two pieces of code must give
// the same bits: otherwise the compiler chooses which product of a sum it fuses.
template <class T>
TANDEM_HD inline T fused(T a, T b, T c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA) || defined(__CUDA_ARCH__)
  return std::fma(a, b, c);
#else
  return a * b + c;
#endif
}

}  // namespace tandem
