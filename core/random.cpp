#include "core/random.h"

#include <cmath>
#include <numbers>
#include <numeric>
#include <utility>

namespace tandem {

std::vector<std::int32_t> permutation(std::int64_t n, const Philox& random, std::int64_t drawn) {
  std::vector<std::int32_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  Words words{};
  for (std::int64_t i = 0; i < drawn && i + 1 < n; i++) {
    if (i % 4 == 0) words = random.block(std::uint32_t(i / 4));
    std::int64_t j = i + std::int64_t((words.w[i % 4] * std::uint64_t(n - i)) >> 32);
    std::swap(order[i], order[j]);
  }
  return order;
}

// Marsaglia and Tsang 2000. Below shape 1: Gamma(a) is Gamma(a + 1)·u^(1/a).
double log_gamma_draw(double shape, const Philox& random) {
  std::uint32_t at = 0;
  const auto next = [&] { return (double(random.word(at++)) + 0.5) * 0x1p-32; };
  const double a = shape < 1 ? shape + 1 : shape, d = a - 1.0 / 3, c = 1 / std::sqrt(9 * d);
  for (;;) {
    const double far = std::sqrt(-2 * std::log(next())), x = far * std::cos(2 * std::numbers::pi * next());
    const double v = std::pow(1 + c * x, 3);
    if (v <= 0 || std::log(next()) >= 0.5 * x * x + d - d * v + d * std::log(v)) continue;
    return std::log(d * v) + (shape < 1 ? std::log(next()) / shape : 0);
  }
}
double gamma_draw(double shape, const Philox& random) {
  return shape <= 0 ? 1 : std::exp(log_gamma_draw(shape, random)) / shape;
}

}  // namespace tandem
