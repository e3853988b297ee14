#include <numeric>

#include "examples/course/check.h"
#include "tandem.h"
#include BODY

using namespace tandem;
using namespace tandem::course;

namespace {

void softplus_is_right() {
  const Numbers x{-5, -0.5, 0, 0.7, 3};
  Numbers yours, right, reversed, no_dy;
  for (double v : x) {
    const double h = 1e-6, difference = (std::log1p(std::exp(v + h)) - std::log1p(std::exp(v - h))) / (2 * h);
    yours.push_back(softplus_backward(v, 3));
    right.push_back(3 * difference);
    reversed.push_back(3 - 3 * difference);
    no_dy.push_back(difference);
  }
  expect_equal("softplus compared with finite differences", yours, right, 1e-8,
               {{reversed, "This is 1/(1 + e^x): the sign of the exponent is wrong."},
                {no_dy, "This is dy/dx. The chain rule multiplies it by dy."}});
  expect_equal("softplus at x = 800", {softplus_backward(800, 3)}, {3}, 1e-12, {},
               "e^800 is infinite. Write the derivative so that no exponential overflows.");
}

// y of a row, and √(v + eps).
std::pair<Numbers, double> normalised(Numbers x, double eps) {
  double mean = 0, variance = 0;
  for (double v : x) mean += v / double(x.size());
  for (double v : x) variance += (v - mean) * (v - mean) / double(x.size());
  const double root = std::sqrt(variance + eps);
  for (double& v : x) v = (v - mean) / root;
  return {x, root};
}
double product(const Numbers& a, const Numbers& b) { return std::inner_product(a.begin(), a.end(), b.begin(), 0.0); }

// The library's gradient, from its tape.
Numbers library_gradient(const Numbers& x, const Numbers& dy, double eps) {
  const auto backend = reference_backend();
  const auto n = std::int64_t(x.size());
  auto row = [&](const Numbers& v, const Shape& s) { return Tensor::of(*backend, s, v, DType::f64); };
  Variable in(row(x, {1, n}), true);
  const Variable gamma(row(Numbers(x.size(), 1), {n})), beta(row(Numbers(x.size(), 0), {n}));
  sum(layer_norm(in, gamma, beta, eps) * Variable(row(dy, {1, n}))).backward();
  return in.grad().values();
}

void layer_norm_is_right() {
  const Numbers x{0.3, -1.2, 2.5, 0.1, -0.4, 1.9, 0.8}, dy{1, -0.5, 0.25, 2, -1, 0.3, 0.7};
  const double eps = 1e-5, h = 1e-6;
  Numbers differences;
  for (std::size_t i = 0; i < x.size(); i++) {
    Numbers up = x, down = x;
    up[i] += h;
    down[i] -= h;
    differences.push_back((product(dy, normalised(up, eps).first) - product(dy, normalised(down, eps).first)) /
                          (2 * h));
  }
  // dx with the subtracted terms a·Σdy and b·y·Σ(dy·y): the correct factors are 1/n.
  auto with = [&](double a, double b) {
    auto [y, root] = normalised(x, eps);
    const double sum_dy = product(dy, Numbers(x.size(), 1)), sum_dyy = product(dy, y);
    Numbers dx;
    for (std::size_t i = 0; i < x.size(); i++) dx.push_back((dy[i] - a * sum_dy - b * y[i] * sum_dyy) / root);
    return dx;
  };
  const double part = 1 / double(x.size());
  const Numbers yours = layer_norm_backward(x, dy, eps);
  expect_equal("layer norm compared with finite differences", yours, differences, 1e-7,
               {{with(0, 0), "This treats the mean and the variance as constants. Both depend on x."},
                {with(part, 0), "The term of the mean is right. The variance depends on x, too."},
                {with(0, part), "The term of the variance is right. The mean depends on x, too."},
                {with(1, 1), "These are sums instead of means: divide both by n."},
                {with(part, 1), "The second sum is not divided by n."},
                {with(1, part), "The first sum is not divided by n."}});
  expect_equal("layer norm compared with the library", yours, library_gradient(x, dy, eps), 1e-12);
}

}  // namespace

int main(int argc, char** argv) {
  return run_exercise(argc, argv, 1, "backward of an operation", [] {
    softplus_is_right();
    layer_norm_is_right();
    return "";
  });
}
