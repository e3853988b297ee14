#include "core/random.h"

#include <cmath>
#include <numbers>
#include <numeric>
#include <utility>

namespace tandem {

std::vector<std::int32_t> permutation(std::int64_t n, const Philox& random) {
  std::vector<std::int32_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  Words words{};
  for (std::int64_t i = 0; i + 1 < n; i++) {
    if (i % 4 == 0) words = random.block(std::uint32_t(i / 4));
    std::int64_t j = i + std::int64_t((words.w[i % 4] * std::uint64_t(n - i)) >> 32);
    std::swap(order[i], order[j]);
  }
  return order;
}

namespace {

// Uniform numbers in (0, 1).
struct Uniforms {
  const Philox& random;
  std::uint32_t at = 0;
  double operator()() { return (double(random.word(at++)) + 0.5) * 0x1p-32; }
};

// Marsaglia and Tsang 2000: a draw of shape a ≥ 1 and scale 1.
double gamma_from_1(double a, Uniforms& next) {
  const double d = a - 1.0 / 3, c = 1 / std::sqrt(9 * d);
  for (;;) {
    const double far = std::sqrt(-2 * std::log(next())), x = far * std::cos(2 * std::numbers::pi * next());
    const double v = std::pow(1 + c * x, 3);
    if (v > 0 && std::log(next()) < 0.5 * x * x + d - d * v + d * std::log(v)) return d * v;
  }
}

}  // namespace

// Below shape 1: Gamma(a) is Gamma(a + 1)·u^(1/a).
double gamma_draw(double shape, const Philox& random) {
  if (shape <= 0) return 1;
  Uniforms next{random};
  const double draw = gamma_from_1(shape < 1 ? shape + 1 : shape, next) / shape;
  return shape < 1 ? draw * std::pow(next(), 1 / shape) : draw;
}
double log_gamma_draw(double shape, const Philox& random) {
  Uniforms next{random};
  const double draw = std::log(gamma_from_1(shape < 1 ? shape + 1 : shape, next));
  return shape < 1 ? draw + std::log(next()) / shape : draw;
}

}  // namespace tandem
