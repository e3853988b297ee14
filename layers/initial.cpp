#include "layers/initial.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <tuple>
#include <vector>

#include "core/launch.h"
#include "core/random.h"

namespace tandem {
namespace {

// Element e of the flat vector has its own block of four random words.
Words words(std::uint64_t seed, std::int64_t e) {
  return Philox(seed, Stream::initial, static_cast<std::uint32_t>(e >> 32)).block(static_cast<std::uint32_t>(e));
}

double standard_normal(std::uint64_t seed, std::int64_t e) {  // Box–Muller, u in (0, 1]
  const Words w = words(seed, e);
  const double u = 1.0 - uniform(w.w[0]), v = uniform(w.w[1]);
  return std::sqrt(-2 * std::log(u)) * std::cos(2 * std::numbers::pi * v);
}

double normal_below(double z) { return 0.5 * std::erfc(-z / std::numbers::sqrt2); }

// The z in [low, high] with P(Z < z) = p for a standard normal Z, by bisection. After 40 halvings the interval is finer
// than the random number.
double normal_quantile(double p, double low, double high) {
  for (int i = 0; i < 40; i++) {
    const double middle = 0.5 * (low + high);
    (normal_below(middle) < p ? low : high) = middle;
  }
  return 0.5 * (low + high);
}

// A normal number between the bounds, by inversion of the distribution function.
struct TruncatedNormal {
  const Initial& how;
  double low = (how.low - how.value) / how.std, high = (how.high - how.value) / how.std, sign = 1, from, to;
  explicit TruncatedNormal(const Initial& initial) : how(initial) {
    // The left tail has full precision, so the right tail is computed by mirroring
    if (low + high > 0) std::tie(low, high, sign) = std::tuple(-high, -low, -1.0);
    from = normal_below(low);
    to = normal_below(high);
  }
  double operator()(double p) const {  // from p in [0, 1)
    const double z = normal_quantile(from + (to - from) * (p + 0x1p-25), low, high);
    return std::clamp(how.value + how.std * sign * z, how.low, how.high);
  }
};

// Element e of the flat vector, independent of all others. For an orthogonal matrix: the input of orthonormalise().
double draw_one(const Initial& how, const TruncatedNormal& truncated, std::uint64_t seed, std::int64_t e) {
  switch (how.kind) {
    case Initial::Kind::uniform: {
      const double middle = 0.5 * (how.low + how.high), half = 0.5 * (how.high - how.low);
      return middle + half * (2.0 * uniform(words(seed, e).w[0]) - 1.0);
    }
    case Initial::Kind::normal: return how.value + how.std * standard_normal(seed, e);
    case Initial::Kind::trunc_normal: return truncated(uniform(words(seed, e).w[0]));
    case Initial::Kind::orthogonal: return standard_normal(seed, e);
    default: return how.value;
  }
}

// Gram–Schmidt, each vector twice against those before it, on `count` vectors of `length`; element k of vector i is
// at(i, k). That is the Q of a QR decomposition whose R has a positive diagonal.
template <class At>
void orthonormalise(std::int64_t count, std::int64_t length, const At& at) {
  std::vector<double> basis(static_cast<std::size_t>(count * length));
  for (std::int64_t i = 0; i < count; i++) {
    double* v = basis.data() + i * length;
    for (std::int64_t k = 0; k < length; k++) v[k] = at(i, k);
    for (int pass = 0; pass < 2; pass++)
      for (std::int64_t j = 0; j < i; j++) {
        const double* u = basis.data() + j * length;
        double dot = 0;
#pragma omp simd reduction(+ : dot)
        for (std::int64_t k = 0; k < length; k++) dot += u[k] * v[k];
#pragma omp simd
        for (std::int64_t k = 0; k < length; k++) v[k] -= dot * u[k];
      }
    double norm = 0;
    for (std::int64_t k = 0; k < length; k++) norm += v[k] * v[k];
    norm = std::sqrt(norm);
    for (std::int64_t k = 0; k < length; k++) v[k] /= norm;
  }
  for (std::int64_t i = 0; i < count; i++)
    for (std::int64_t k = 0; k < length; k++) at(i, k) = basis[static_cast<std::size_t>(i * length + k)];
}

Initial symmetric_uniform(double bound) { return Initial::uniform(-bound, bound); }

double kaiming_std(const Shape& weight, const KaimingOptions& o) {
  return calculate_gain(o.nonlinearity, o.slope) / std::sqrt(double(fan(weight, o.mode)));
}

double xavier_std(const Shape& weight, double gain) {
  return gain * std::sqrt(2.0 / double(fan(weight, Fan::in) + fan(weight, Fan::out)));
}

}  // namespace

double calculate_gain(Nonlinearity nonlinearity, double slope) {
  switch (nonlinearity) {
    case Nonlinearity::tanh: return 5.0 / 3;
    case Nonlinearity::relu: return std::numbers::sqrt2;
    case Nonlinearity::leaky_relu: return std::sqrt(2 / (1 + slope * slope));
    default: return 1;
  }
}

std::int64_t fan(const Shape& w, Fan mode) {
  require(w.rank() >= 2, "a fan needs a weight of two axes or more, not ", w);
  std::int64_t kernel_area = 1;
  for (int axis = 1; axis + 1 < w.rank(); axis++) kernel_area *= w[axis];
  return kernel_area * (mode == Fan::in ? w[-1] : w[0]);
}

Initial Initial::xavier_uniform(const Shape& weight, double gain) {
  return symmetric_uniform(std::sqrt(3.0) * xavier_std(weight, gain));
}
Initial Initial::xavier_normal(const Shape& weight, double gain) { return normal(0, xavier_std(weight, gain)); }
Initial Initial::kaiming_uniform(const Shape& weight, const KaimingOptions& o) {
  return symmetric_uniform(std::sqrt(3.0) * kaiming_std(weight, o));
}
Initial Initial::kaiming_normal(const Shape& weight, const KaimingOptions& o) {
  return normal(0, kaiming_std(weight, o));
}
Initial Initial::fan_in_uniform(std::int64_t fan_in) { return symmetric_uniform(1 / std::sqrt(double(fan_in))); }

void draw(const Initial& how, const Shape& shape, std::uint64_t seed, std::int64_t begin, std::span<double> out,
          int threads, std::int64_t from) {
  const auto n = static_cast<std::int64_t>(out.size());
  if (n == 0) return;
  const bool orthogonal = how.kind == Initial::Kind::orthogonal;
  require(!orthogonal || shape.rank() >= 2, "orthogonal: a weight of two axes or more is meant, not ", shape);
  require(how.kind != Initial::Kind::trunc_normal || (how.low < how.high && how.std > 0),
          "trunc_normal: no numbers between ", how.low, " and ", how.high);
  if (orthogonal && n < shape.numel()) {  // its elements depend on each other
    std::vector<double> whole(static_cast<std::size_t>(shape.numel()));
    draw(how, shape, seed, begin, whole, threads);
    std::copy_n(whole.begin() + from, n, out.begin());
    return;
  }
  const TruncatedNormal truncated(how);
  parallel_ranges(n >= parallel_grain ? threads : 1, n, 64, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t k = first; k < last; k++)
      out[static_cast<std::size_t>(k)] = draw_one(how, truncated, seed, begin + from + k);
  });
  if (!orthogonal) return;
  const std::int64_t rows = shape[0], columns = shape.numel() / rows;
  const bool wide = rows <= columns;
  orthonormalise(std::min(rows, columns), std::max(rows, columns), [&](std::int64_t i, std::int64_t k) -> double& {
    return out[static_cast<std::size_t>(wide ? i * columns + k : k * columns + i)];
  });
  for (double& v : out) v *= how.value;
}

}  // namespace tandem
