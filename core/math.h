// exp, tanh and erf in a form that compilers vectorise (the C library's are calls). float: within 2 ulp of the true value for
// exp, 4e-7 absolute for tanh and erf; double goes to the C library.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

#include "core/hd.h"

namespace tandem {

// 2^n · 2^f with n = round(x·log2 e) and a degree-6 polynomial for e^r, |r| ≤ ln2 / 2. NaN stays NaN; overflow is infinity.
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
  std::int32_t k = static_cast<std::int32_t>(n),
               half = k >> 1;  // in two factors, so that denormals and infinity come out
  float result = p * std::bit_cast<float>((half + 127) << 23) * std::bit_cast<float>((k - half + 127) << 23);
  return x == x ? result : x;
}
TANDEM_HD inline double exponential(double x) { return std::exp(x); }

TANDEM_HD inline float hyperbolic_tangent(float x) {
  float a = x < 0 ? -x : x;
  float e = exponential(-2.f * a);
  float far = (1.f - e) / (1.f + e);
  float s = x * x;  // near zero the quotient loses digits: the odd series
  float near = a * (1.f + s * (-1.f / 3 + s * (2.f / 15 + s * (-17.f / 315 + s * (62.f / 2835)))));
  float t = a < 0.3f ? near : far;
  return x < 0 ? -t : t;
}
TANDEM_HD inline double hyperbolic_tangent(double x) { return std::tanh(x); }

// Abramowitz & Stegun 7.1.26.
TANDEM_HD inline float error_function(float x) {
  float a = x < 0 ? -x : x;
  float t = 1.f / (1.f + 0.3275911f * a);
  float p = ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t;
  float y = 1.f - p * exponential(-a * a);
  return x < 0 ? -y : y;
}
TANDEM_HD inline double error_function(double x) { return std::erf(x); }

// a·b + c, rounded once where the processor can and twice where it cannot. Said outright where two pieces of code must give
// the same bits: compilers choose for themselves which product of a sum they fuse.
template <class T>
TANDEM_HD inline T fused(T a, T b, T c) {
#if defined(__FMA__) || defined(__CUDA_ARCH__)
  return std::fma(a, b, c);
#else
  return a * b + c;
#endif
}

}  // namespace tandem
