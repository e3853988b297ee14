// The memory-bound operations of the cpu backend against double loops written here: every operation in f32 and bf16, on
// one thread and two, with row and channel counts that fill no vector, overlapping and padded windows, adding, NaN.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "autograd/ops.h"
#include "core/backend.h"

using namespace tandem;

namespace {

using Values = std::vector<double>;
const double nan_value = std::numeric_limits<double>::quiet_NaN();
const double infinity = std::numeric_limits<double>::infinity();

// Random numbers as the type keeps them, so that the loops below start from the same values as the backend.
Values rounded(Values v, DType t) {
  for (double& d : v) {
    float f = static_cast<float>(d);
    d = t == DType::bf16 ? static_cast<float>(bf16(f)) : f;
  }
  return v;
}
Values random_values(std::int64_t n, unsigned seed, double mean = 0, double std = 1) {
  std::mt19937 engine(seed);
  std::normal_distribution<double> normal(mean, std);
  Values v(n);
  for (double& d : v) d = normal(engine);
  return v;
}

struct Case {
  DType type;
  int threads;
};
std::string name_of_case(const testing::TestParamInfo<Case>& info) {
  return std::string(name_of(info.param.type)) + "_" + std::to_string(info.param.threads);
}

class CpuKernels : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    backend = cpu_backend(GetParam().threads);
    if (!backend->supports(type)) GTEST_SKIP() << "no " << name_of(type) << " on this CPU";
  }
  Tensor picture(const Values& v) { return Tensor::of(*backend, {std::int64_t(v.size())}, v, type); }
  Tensor parameter(const Values& v) { return Tensor::of(*backend, {std::int64_t(v.size())}, v); }
  Values random(std::int64_t n, unsigned seed, double mean = 0, double std = 1) {
    return rounded(random_values(n, seed, mean, std), type);
  }
  // A result of the picture's type may be off by its rounding; f32 by the order of its sums.
  double tolerance() const { return type == DType::bf16 ? 1.0 / 128 : 2e-5; }
  DType type = GetParam().type;
  std::unique_ptr<Backend> backend;
};

// |got − want| ≤ tolerance·(scale + |want|); NaN and infinities must agree.
void expect_near(const Values& got, const Values& want, double tolerance, const std::string& what, double scale = 1) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (std::size_t i = 0; i < got.size(); i++) {
    if (std::isnan(want[i]) ? std::isnan(got[i]) : got[i] == want[i]) continue;
    ASSERT_LE(std::abs(got[i] - want[i]), tolerance * (scale + std::abs(want[i])))
        << what << ": element " << i << " is " << got[i] << ", expected " << want[i];
  }
}

std::vector<char> bits(const Tensor& t) {
  std::vector<char> b(t.bytes());
  t.backend().download(b.data(), t.raw(), t.bytes());
  return b;
}

const std::int64_t row_counts[] = {1, 7, 1000}, channel_counts[] = {1, 3, 6, 10, 16, 17, 64};

// Calls f for every combination of rows and channels, and for one that is large enough to be shared by threads.
void for_shapes(const std::function<void(std::int64_t, std::int64_t)>& f) {
  for (std::int64_t rows : row_counts)
    for (std::int64_t c : channel_counts) f(rows, c);
  f(2001, 17);
  f(101, 512);
}

// ---- batch normalisation --------------------------------------------------------------------------------------------
struct Norm {
  Values y, mean, inverse, running_mean, running_variance;
};
Norm norm_forward(const NormShape& s, const Values& x, const Values* residual, const Values& gamma, const Values& beta,
                  Values running_mean, Values running_variance) {
  Norm n{Values(x.size()), Values(s.channels), Values(s.channels), running_mean, running_variance};
  for (std::int64_t c = 0; c < s.channels; c++) {
    double sum = 0, square = 0;
    for (std::int64_t r = 0; r < s.rows; r++) sum += x[r * s.channels + c];
    const double mean = sum / s.rows;
    for (std::int64_t r = 0; r < s.rows; r++) square += std::pow(x[r * s.channels + c] - mean, 2);
    const double variance = square / s.rows, unbiased = s.rows > 1 ? square / (s.rows - 1) : variance;
    n.mean[c] = mean;
    n.inverse[c] = 1 / std::sqrt(variance + s.epsilon);
    n.running_mean[c] = (1 - s.momentum) * running_mean[c] + s.momentum * mean;
    n.running_variance[c] = (1 - s.momentum) * running_variance[c] + s.momentum * unbiased;
    for (std::int64_t r = 0; r < s.rows; r++) {
      const std::int64_t i = r * s.channels + c;
      double v = (x[i] - mean) * n.inverse[c] * gamma[c] + beta[c] + (residual ? (*residual)[i] : 0);
      n.y[i] = s.relu && v < 0 ? 0 : v;
    }
  }
  return n;
}

TEST_P(CpuKernels, BatchNormForward) {
  for_shapes([&](std::int64_t rows, std::int64_t channels) {
    for (int variant = 0; variant < 4; variant++) {
      NormShape s{rows, channels};
      s.relu = variant & 1;
      const bool with_residual = variant & 2;
      const Values x = random(rows * channels, 1, 0.5, 2), residual = random(rows * channels, 2);
      const Values gamma = rounded(random_values(channels, 3, 1, 0.2), DType::f32),
                   beta = rounded(random_values(channels, 4), DType::f32),
                   old_mean = rounded(random_values(channels, 5), DType::f32), old_variance(channels, 1.5);
      const Norm want = norm_forward(s, x, with_residual ? &residual : nullptr, gamma, beta, old_mean, old_variance);
      Tensor tx = picture(x), tr = picture(residual), ty = Tensor::like(tx), tg = parameter(gamma),
             tb = parameter(beta);
      Tensor rm = parameter(old_mean), rv = parameter(old_variance), m = Tensor::like(tg), inverse = Tensor::like(tg);
      backend->batch_norm(s, tx, with_residual ? &tr : nullptr, tg, tb, rm, rv, ty, m, inverse);
      const std::string what = "batch norm " + std::to_string(rows) + "×" + std::to_string(channels);
      double scale = 2;  // where the variance is next to nothing, the rounding of the mean shows
      for (std::int64_t c = 0; c < channels; c++)
        scale = std::max(scale, std::abs(want.mean[c] * want.inverse[c]) / 50);
      expect_near(ty.values(), want.y, tolerance(), what + " y", scale);
      expect_near(m.values(), want.mean, 2e-6, what + " mean");
      if (rows > 1) expect_near(inverse.values(), want.inverse, 1e-5, what + " inverse standard deviation");
      expect_near(rm.values(), want.running_mean, 2e-6, what + " running mean");
      expect_near(rv.values(), want.running_variance, 1e-5, what + " running variance");

      const std::vector<char> before = bits(ty);
      Tensor again = Tensor::like(tx);
      backend->batch_norm(s, tx, with_residual ? &tr : nullptr, tg, tb, rm, rv, again, m, inverse);
      EXPECT_TRUE(bits(again) == before) << what << ": the second run gave other bits";

      backend->batch_norm_inference(s, tx, with_residual ? &tr : nullptr, tg, tb, parameter(old_mean),
                                    parameter(old_variance), ty);
      Values y(x.size());
      for (std::int64_t i = 0; i < rows * channels; i++) {
        const std::int64_t c = i % channels;
        const double v = (x[i] - old_mean[c]) / std::sqrt(old_variance[c] + s.epsilon) * gamma[c] + beta[c] +
                         (with_residual ? residual[i] : 0);
        y[i] = s.relu && v < 0 ? 0 : v;
      }
      expect_near(ty.values(), y, tolerance(), what + " inference", 2);
    }
  });
}

// The convolution before it may have taken the statistics already: of odd sizes, of few tiles, far from zero, and not
// to be used once its result was changed.
TEST_P(CpuKernels, BatchNormBehindConvolution) {
  backend->deterministic(true);  // Winograd, by rule
  const ConvShape shapes[] = {{.n = 3, .h = 14, .w = 13, .c_in = 16, .c_out = 32},
                              {.n = 40, .h = 16, .w = 16, .c_in = 16, .c_out = 16},
                              {.n = 1, .h = 8, .w = 8, .c_in = 128, .c_out = 128}};
  for (ConvShape c : shapes) {
    c.kh = c.kw = 3, c.pad_h = c.pad_w = 1;
    const Values weights = rounded(random_values(c.w_numel(), 2, 0.05, 0.1), DType::f32);
    Tensor x = Tensor::of(*backend, {c.n, c.h, c.w, c.c_in}, random(c.x_numel(), 1, 2), type);
    Tensor w = Tensor::of(*backend, {c.c_out, 3, 3, c.c_in}, weights), y(*backend, {c.n, c.h, c.w, c.c_out}, type);
    const NormShape s{c.n * c.h * c.w, c.c_out};
    const Values ones(c.c_out, 1), zeros(c.c_out, 0);
    for (bool changed : {false, true}) {
      backend->conv2d(c, x, w, nullptr, false, y);
      if (changed) y.copy_from(Tensor::of(*backend, y.shape(), random(y.numel(), 3), type));
      Tensor out = Tensor::like(y), gamma = parameter(ones), beta = parameter(zeros), mean = parameter(zeros);
      Tensor rm = parameter(zeros), rv = parameter(ones), inverse = parameter(ones);
      backend->batch_norm(s, y, nullptr, gamma, beta, rm, rv, out, mean, inverse);
      const Norm want = norm_forward(s, y.values(), nullptr, ones, zeros, zeros, ones);
      const std::string what = std::to_string(c.c_in) + " channels" + (changed ? ", changed" : "");
      // The sums are of f32 values, before they are rounded to bf16
      const double near = type == DType::bf16 ? 1e-2 : 1e-5;
      expect_near(mean.values(), want.mean, near, what + " mean");
      expect_near(inverse.values(), want.inverse, near, what + " inverse standard deviation", 0);
      expect_near(rv.values(), want.running_variance, 2 * near, what + " running variance", 0);
      expect_near(out.values(), want.y, tolerance(), what + " y", 2);
    }
  }
}

// The variance of numbers far from zero: 1000 ± 1, and 1000 ± 1 after a first picture of zeros.
TEST_P(CpuKernels, BatchNormLargeMean) {
  if (type == DType::bf16) GTEST_SKIP() << "bf16 does not hold such numbers";
  for (bool zeros_first : {false, true}) {
    NormShape s{8000, 16};
    s.momentum = 1;
    Values x = random(s.rows * s.channels, 1, 1000, 1);
    if (zeros_first) std::fill_n(x.begin(), 160 * 16, 0.0);
    const Values ones(16, 1.0), none(16, 0.0);
    const Norm want = norm_forward(s, x, nullptr, ones, none, none, ones);
    Tensor tx = picture(x), ty = Tensor::like(tx), tg = parameter(ones), tb = parameter(none);
    Tensor rm = parameter(none), rv = parameter(ones), m = Tensor::like(tg), inverse = Tensor::like(tg);
    backend->batch_norm(s, tx, nullptr, tg, tb, rm, rv, ty, m, inverse);
    expect_near(rv.values(), want.running_variance, 1e-4, "variance", 0);
    expect_near(m.values(), want.mean, 1e-6, "mean", 0);
    expect_near(ty.values(), want.y, 3e-4, "y");
  }
}

TEST_P(CpuKernels, BatchNormNaN) {
  NormShape s{50, 6};
  s.relu = true;
  Values x = random(300, 1);
  x[6 * 20 + 3] = nan_value;
  const Values ones(6, 1.0), none(6, 0.0);
  Tensor tx = picture(x), ty = Tensor::like(tx), tg = parameter(ones), tb = parameter(none);
  Tensor rm = parameter(none), rv = parameter(ones), m = Tensor::like(tg), inverse = Tensor::like(tg);
  backend->batch_norm(s, tx, nullptr, tg, tb, rm, rv, ty, m, inverse);
  const Values y = ty.values();
  for (std::int64_t i = 0; i < 300; i++) EXPECT_EQ(std::isnan(y[i]), i % 6 == 3) << i;
}

TEST_P(CpuKernels, BatchNormBackward) {
  for_shapes([&](std::int64_t rows, std::int64_t channels) {
    // relu, residual (with y for the mask), add, dresidual in place of dy
    for (int variant = 0; variant < 16; variant++) {
      const bool with_relu = variant & 1, with_residual = variant & 2, add = variant & 4, in_place = variant & 8;
      if (in_place && (!with_residual || add)) continue;
      NormShape s{rows, channels};
      s.relu = with_relu;
      const std::int64_t n = rows * channels;
      const Values x = random(n, 1, 0.5, 2), residual = random(n, 2), dy = random(n, 3), old = random(n, 4);
      const Values gamma = rounded(random_values(channels, 5, 1, 0.2), DType::f32),
                   beta = rounded(random_values(channels, 6), DType::f32), old_parameter(channels, 0.25);
      Tensor tx = picture(x), tr = picture(residual), ty = Tensor::like(tx), tdy = picture(dy), tg = parameter(gamma),
             tb = parameter(beta), rm = parameter(gamma), rv = parameter(gamma), m = Tensor::like(tg),
             inverse = Tensor::like(tg);
      backend->batch_norm(s, tx, with_residual ? &tr : nullptr, tg, tb, rm, rv, ty, m, inverse);

      const Values y = ty.values(), mean = m.values(), std = inverse.values();
      Values dx(n), d(n), dgamma(channels), dbeta(channels);
      for (std::int64_t i = 0; i < n; i++) {
        const std::int64_t c = i % channels;
        d[i] = with_relu && y[i] <= 0 ? 0 : dy[i];
        dbeta[c] += d[i];
        dgamma[c] += d[i] * (x[i] - mean[c]) * std[c];
      }
      for (std::int64_t i = 0; i < n; i++) {
        const std::int64_t c = i % channels;
        dx[i] = gamma[c] * std[c] * (d[i] - dbeta[c] / rows - (x[i] - mean[c]) * std[c] * dgamma[c] / rows) +
                (add ? old[i] : 0);
      }
      Values dresidual = d;
      if (add)
        for (std::int64_t i = 0; i < n; i++) dresidual[i] += old[i];
      if (add)
        for (std::int64_t c = 0; c < channels; c++) dgamma[c] += 0.25, dbeta[c] += 0.25;

      // Not added to: old contents must not be read, so they are NaN.
      const Values garbage(n, nan_value), garbage_parameter(channels, nan_value);
      auto run = [&](Tensor& gradient, Tensor& tdx, Tensor& tdr, Tensor& tdg, Tensor& tdb) {
        Backend::NormGradients out;
        out.dx = &tdx, out.dgamma = &tdg, out.dbeta = &tdb;
        if (with_residual) out.dresidual = in_place ? &gradient : &tdr;
        out.add_dx = out.add_dresidual = out.add_dgamma = out.add_dbeta = add;
        backend->batch_norm_backward(s, tx, with_residual ? &ty : nullptr, gradient, tg, tb, m, inverse, out);
      };
      Tensor tdx = picture(add ? old : garbage), tdr = picture(add ? old : garbage),
             tdg = parameter(add ? old_parameter : garbage_parameter),
             tdb = parameter(add ? old_parameter : garbage_parameter);
      run(tdy, tdx, tdr, tdg, tdb);
      const std::string what = "batch norm backward " + std::to_string(rows) + "×" + std::to_string(channels) +
                               " variant " + std::to_string(variant);
      double scale = 1;  // the terms of dx cancel where the variance is next to nothing
      for (double v : std) scale = std::max(scale, v);
      expect_near(tdx.values(), dx, tolerance(), what + " dx", scale);
      if (with_residual) expect_near((in_place ? tdy : tdr).values(), dresidual, tolerance(), what + " dresidual");
      expect_near(tdg.values(), dgamma, 1e-5, what + " dgamma", std::sqrt(double(rows)));
      expect_near(tdb.values(), dbeta, 1e-5, what + " dbeta", std::sqrt(double(rows)));

      Tensor gradient = picture(dy), again = picture(add ? old : garbage), dr = picture(add ? old : garbage),
             dg = parameter(old_parameter), db = parameter(old_parameter);
      run(gradient, again, dr, dg, db);
      EXPECT_TRUE(bits(again) == bits(tdx)) << what << ": the second run gave other bits";

      if (variant == 3) {  // each gradient alone
        Backend::NormGradients only;
        Tensor alone = picture(garbage), fresh = picture(dy);
        only.dresidual = &alone;
        backend->batch_norm_backward(s, tx, &ty, fresh, tg, tb, m, inverse, only);
        expect_near(alone.values(), d, tolerance(), what + " dresidual alone");
        only = {};
        only.dbeta = &db;
        backend->batch_norm_backward(s, tx, &ty, fresh, tg, tb, m, inverse, only);
        expect_near(db.values(), dbeta, 1e-5, what + " dbeta alone", std::sqrt(double(rows)));
      }
    }
  });
}

// ---- pooling --------------------------------------------------------------------------------------------------------
std::vector<PoolShape> pool_shapes() {
  std::vector<PoolShape> shapes;
  for (std::int64_t c : channel_counts) {
    shapes.push_back({2, 8, 6, c});                    // pairs
    shapes.push_back({2, 7, 9, c});                    // pairs, a row and a column left over
    shapes.push_back({2, 7, 9, c, 3, 3, 2, 2, 1, 1});  // overlapping, padded
    shapes.push_back({1, 6, 7, c, 3, 2, 1, 3, 1, 0});  // different in height and width, gaps between columns
  }
  shapes.push_back({3, 9, 9, 17, 3, 3, 3, 3});       // tiles of three
  shapes.push_back({3, 4, 5, 10, 4, 5, 4, 5});       // global
  shapes.push_back({2, 5, 5, 6, 2, 2, 3, 3, 0, 0});  // pixels that no window contains
  shapes.push_back({8, 28, 28, 32});
  shapes.push_back({8, 15, 15, 48, 3, 3, 2, 2, 1, 1});
  return shapes;
}
std::string describe(const PoolShape& s) {
  std::ostringstream out;
  out << "pool " << s.n << "×" << s.h << "×" << s.w << "×" << s.c << " window " << s.kh << "×" << s.kw << " stride "
      << s.stride_h << "×" << s.stride_w << " pad " << s.pad_h << "×" << s.pad_w;
  return out.str();
}

// Calls f(position of y, position of x, position in the window) for every element of every window that lies in the
// picture.
void for_windows(const PoolShape& s, const std::function<void(std::int64_t, std::int64_t, std::int64_t)>& f) {
  for (std::int64_t n = 0; n < s.n; n++)
    for (std::int64_t oh = 0; oh < s.out_h(); oh++)
      for (std::int64_t ow = 0; ow < s.out_w(); ow++)
        for (std::int64_t c = 0; c < s.c; c++)
          for (std::int64_t i = 0; i < s.kh; i++)
            for (std::int64_t j = 0; j < s.kw; j++) {
              const std::int64_t h = oh * s.stride_h - s.pad_h + i, w = ow * s.stride_w - s.pad_w + j;
              if (h < 0 || h >= s.h || w < 0 || w >= s.w) continue;
              f(((n * s.out_h() + oh) * s.out_w() + ow) * s.c + c, ((n * s.h + h) * s.w + w) * s.c + c, i * s.kw + j);
            }
}

TEST_P(CpuKernels, MaxPool) {
  for (const PoolShape& s : pool_shapes())
    for (bool relu : {false, true})
      for (bool add : {false, true}) {
        const std::int64_t nx = s.n * s.h * s.w * s.c, ny = s.n * s.out_h() * s.out_w() * s.c;
        Values x = random(nx, 1, -0.3);
        for (double& v : x) v = std::round(v * 4) / 4;  // many ties: the first must win
        x[nx / 2] = nan_value;
        const Values dy = random(ny, 2), old = random(nx, 3);
        Values y(ny, -infinity), argmax(ny, -1), dx(nx, 0.0), from(ny, -1);
        for_windows(s, [&](std::int64_t at, std::int64_t source, std::int64_t position) {
          const bool better = argmax[at] < 0 || x[source] > y[at] || (std::isnan(x[source]) && !std::isnan(y[at]));
          if (better) y[at] = x[source], argmax[at] = double(position), from[at] = double(source);
        });
        for (std::int64_t i = 0; i < ny; i++) {
          if (relu && y[i] <= 0) y[i] = 0, argmax[i] = 255;
          if (argmax[i] != 255) dx[std::int64_t(from[i])] += dy[i];
        }
        if (add)
          for (std::int64_t i = 0; i < nx; i++) dx[i] += old[i];
        Tensor tx = picture(x), ty(*backend, {ny}, type), tw(*backend, {ny}, DType::u8), tdy = picture(dy);
        backend->max_pool(s, tx, relu, ty, &tw);
        expect_near(ty.values(), y, 0, describe(s));
        expect_near(tw.values(), argmax, 0, describe(s) + " argmax");
        Tensor without(*backend, {ny}, type);
        backend->max_pool(s, tx, relu, without, nullptr);
        EXPECT_TRUE(bits(without) == bits(ty)) << describe(s);
        Tensor tdx = picture(add ? old : Values(nx, nan_value));
        backend->max_pool_backward(s, tdy, tw, tdx, add);
        expect_near(tdx.values(), dx, tolerance(), describe(s) + " dx");
      }
}

TEST_P(CpuKernels, AveragePool) {
  for (const PoolShape& s : pool_shapes())
    for (bool add : {false, true}) {
      const std::int64_t nx = s.n * s.h * s.w * s.c, ny = s.n * s.out_h() * s.out_w() * s.c;
      const Values x = random(nx, 1), dy = random(ny, 2), old = random(nx, 3);
      Values y(ny), count(ny), dx(nx);
      for_windows(s, [&](std::int64_t at, std::int64_t source, std::int64_t) { y[at] += x[source], count[at]++; });
      for_windows(s, [&](std::int64_t at, std::int64_t source, std::int64_t) { dx[source] += dy[at] / count[at]; });
      for (std::int64_t i = 0; i < ny; i++) y[i] /= count[i];
      if (add)
        for (std::int64_t i = 0; i < nx; i++) dx[i] += old[i];
      Tensor tx = picture(x), ty(*backend, {ny}, type), tdy = picture(dy),
             tdx = picture(add ? old : Values(nx, nan_value));
      backend->average_pool(s, tx, ty);
      expect_near(ty.values(), y, tolerance(), describe(s));
      backend->average_pool_backward(s, tdy, tdx, add);
      expect_near(tdx.values(), dx, tolerance(), describe(s) + " dx");
    }
}

// ---- rows and reductions --------------------------------------------------------------------------------------------
TEST_P(CpuKernels, SumRows) {
  auto check = [&](std::int64_t rows, std::int64_t channels) {
    const Values dy = random(rows * channels, 1, 0.1);
    for (bool add : {false, true}) {
      Values want(channels, add ? 0.5 : 0.0);
      for (std::int64_t i = 0; i < rows * channels; i++) want[i % channels] += dy[i];
      Tensor db = parameter(Values(channels, add ? 0.5 : nan_value)), tdy = picture(dy);
      backend->sum_rows(tdy, db, add);
      expect_near(db.values(), want, 1e-6, "sum rows " + std::to_string(rows) + "×" + std::to_string(channels),
                  std::sqrt(double(rows)));
    }
  };
  for_shapes(check);
  check(100, 1500);  // rows too long to be folded
}

TEST_P(CpuKernels, Reduce) {
  const std::int64_t shapes[][3] = {{1, 1, 1},     {1, 1000, 1},  {7, 13, 1},    {1, 40000, 1},
                                    {3, 5, 6},     {64, 49, 17},  {2, 600, 64},  {1, 3, 2000},
                                    {4, 20, 1100}, {300, 10, 20}, {1, 12000, 3}, {5, 0, 4}};
  for (auto [outer, middle, inner] : shapes)
    for (Reduction op : {Reduction::sum, Reduction::max})
      for (bool add : {false, true}) {
        Values x = random(outer * middle * inner, 1, -1);
        if (x.size() > 40) x[x.size() / 2] = nan_value;
        const Values old = random(outer * inner, 2);
        Values want(outer * inner, op == Reduction::sum ? 0 : -infinity);
        for (std::int64_t o = 0; o < outer; o++)
          for (std::int64_t m = 0; m < middle; m++)
            for (std::int64_t i = 0; i < inner; i++) {
              double& w = want[o * inner + i];
              const double v = x[(o * middle + m) * inner + i];
              if (op == Reduction::sum)
                w += v;
              else
                w = std::isnan(v) || v > w ? v : w;
            }
        if (add)
          for (std::int64_t i = 0; i < outer * inner; i++) want[i] += old[i];
        Tensor tx = picture(x), ty = picture(add ? old : Values(outer * inner, nan_value));
        backend->reduce(op, outer, middle, inner, tx, ty, add);
        std::ostringstream what;
        what << (op == Reduction::sum ? "sum " : "max ") << outer << "×" << middle << "×" << inner;
        expect_near(ty.values(), want, tolerance(), what.str());
        Tensor again = picture(add ? old : Values(outer * inner, nan_value));
        backend->reduce(op, outer, middle, inner, tx, again, add);
        EXPECT_TRUE(bits(again) == bits(ty)) << what.str();
      }
}

TEST_P(CpuKernels, SquaredNorm) {
  for (std::int64_t n : {1, 7, 63, 64, 1000, 40001})
    for (bool add : {false, true}) {
      Values x = random(n, 1);
      double want = add ? 2 : 0;
      for (double v : x) want += v * v;
      Tensor tx = picture(x), ty = parameter({add ? 2.0 : nan_value});
      backend->squared_norm(tx, ty, add);
      expect_near(ty.values(), {want}, 1e-6, "sum of squares");
      x[n / 2] = infinity;
      Tensor bad = picture(x);
      backend->squared_norm(bad, ty, false);
      EXPECT_EQ(ty.item(), infinity);
      x[n / 2] = nan_value;
      Tensor worse = picture(x);
      backend->squared_norm(worse, ty, false);
      EXPECT_TRUE(std::isnan(ty.item()));
    }
}

const std::int64_t class_counts[] = {1, 2, 10, 16, 100, 1000};

Values softmax_row(const double* x, std::int64_t n) {
  double largest = -infinity, sum = 0;
  for (std::int64_t c = 0; c < n; c++) largest = std::max(largest, x[c]);
  for (std::int64_t c = 0; c < n; c++) sum += std::exp(x[c] - largest);
  Values log_p(n);
  for (std::int64_t c = 0; c < n; c++) log_p[c] = x[c] - largest - std::log(sum);
  return log_p;
}

TEST_P(CpuKernels, LogSoftmax) {
  for (std::int64_t classes : class_counts)
    for (std::int64_t rows : {1, 7, 130}) {
      const std::int64_t n = rows * classes;
      Values x = random(n, 1, 50, 10);
      if (n > 20) x[n - 1] = -infinity;
      const Values dy = random(n, 2);
      Values want, dx(n);
      for (std::int64_t r = 0; r < rows; r++)
        for (double v : softmax_row(x.data() + r * classes, classes)) want.push_back(v);
      const Variable tx(picture(x).reshape({rows, classes}), true);
      const Variable y = log_softmax(tx);
      expect_near(y.value().values(), want, tolerance(), "log softmax");
      sum(mul(reshape(y, Shape{n}), picture(dy).reshape({n}))).backward();
      const Values kept = y.value().values();
      for (std::int64_t r = 0; r < rows; r++) {
        double sum = 0;
        for (std::int64_t c = 0; c < classes; c++) sum += dy[r * classes + c];
        for (std::int64_t i = r * classes; i < (r + 1) * classes; i++) dx[i] = dy[i] - std::exp(kept[i]) * sum;
      }
      expect_near(tx.grad().values(), dx, tolerance(), "log softmax backward", std::sqrt(double(classes)));
    }
}

TEST_P(CpuKernels, CrossEntropy) {
  for (std::int64_t classes : class_counts)
    for (std::int64_t rows : {1, 7, 130})
      for (double smoothing : {0.0, 0.1}) {
        const std::int64_t n = rows * classes;
        Values x = random(n, 1, 0, 3);
        for (double& v : x) v = std::round(v);  // ties: only the first largest counts as the answer
        if (classes > 1) x[n - 1] = smoothing == 0 ? -infinity : -90;
        const Values old = random(n, 3);
        Values labels(rows), p(n), dx(n);
        double loss = 0, correct = 5;
        for (std::int64_t r = 0; r < rows; r++) {
          const double* row = x.data() + r * classes;
          const std::int64_t first = std::max_element(row, row + classes) - row;
          const std::int64_t label = r % 3 == 0   ? first
                                     : r % 3 == 1 ? (r * 7) % std::max<std::int64_t>(1, classes - 1)
                                                  : 0;
          labels[r] = double(label);
          correct += label == first;
          const Values log_p = softmax_row(row, classes);
          for (std::int64_t c = 0; c < classes; c++) {
            const double q = (c == label) * (1 - smoothing) + smoothing / classes;
            if (q > 0) loss -= q * log_p[c] / rows;
            p[r * classes + c] = std::exp(log_p[c]);
            dx[r * classes + c] = (p[r * classes + c] - q) * 0.5 / rows;
          }
        }
        Tensor tx = picture(x).reshape({rows, classes}), tl = Tensor::of(*backend, {rows}, labels, DType::i32);
        Tensor tp(*backend, {rows, classes}), tloss(*backend, {1}), tc = Tensor::of(*backend, {1}, {5}, DType::i32);
        backend->cross_entropy(tx, tl, smoothing, tloss, tp, &tc);
        expect_near(tloss.values(), {loss}, 1e-5, "loss");
        expect_near(tp.values(), p, 1e-5, "probabilities", 0.01);
        EXPECT_EQ(tc.item(), correct);
        const std::vector<char> before = bits(tloss);
        backend->cross_entropy(tx, tl, smoothing, tloss, tp, nullptr);
        EXPECT_TRUE(bits(tloss) == before);
        for (bool add : {false, true}) {
          Values want = dx;
          if (add)
            for (std::int64_t i = 0; i < n; i++) want[i] += old[i];
          Tensor tdx = picture(add ? old : Values(n, nan_value)).reshape({rows, classes});
          backend->cross_entropy_backward(tp, tl, smoothing, parameter({0.5}), tdx, add);
          expect_near(tdx.values(), want,
                      add                   ? tolerance()
                      : type == DType::bf16 ? 1.0 / 200
                                            : 1e-5,
                      "cross-entropy backward", add ? 1 : 0.5 / rows);
        }
      }
  Tensor x = picture(Values(20, 0.0)).reshape({2, 10}), labels = Tensor::of(*backend, {2}, {3, 10}, DType::i32);
  Tensor p(*backend, {2, 10}), loss(*backend, {1});
  EXPECT_THROW(backend->cross_entropy(x, labels, 0, loss, p, nullptr), Error);
  labels = Tensor::of(*backend, {2}, {-1, 3}, DType::i32);
  EXPECT_THROW(backend->cross_entropy(x, labels, 0, loss, p, nullptr), Error);
}

INSTANTIATE_TEST_SUITE_P(All, CpuKernels,
                         testing::Values(Case{DType::f32, 1}, Case{DType::f32, 2}, Case{DType::bf16, 1},
                                         Case{DType::bf16, 2}),
                         name_of_case);

// ---- the backend ----------------------------------------------------------------------------------------------------
TEST(CpuBackend, DescribesItself) {
  auto backend = cpu_backend(2);
  EXPECT_EQ(backend->threads(), 2);
  EXPECT_TRUE(backend->supports(DType::f32));
  EXPECT_FALSE(backend->supports(DType::i32));
  EXPECT_NE(backend->description().find("2 threads"), std::string::npos) << backend->description();
  EXPECT_GE(cpu_backend()->threads(), 1);
}

TEST(CpuBackend, RefusesDoubles) {
  auto backend = cpu_backend(1);
  if (backend->name() == "reference") GTEST_SKIP() << "built without oneDNN";
  EXPECT_FALSE(backend->supports(DType::f64));
  Tensor x(*backend, {4}, DType::f64), y(*backend, {1}, DType::f64);
  try {
    backend->reduce(Reduction::sum, 1, 4, 1, x, y, false);
    FAIL() << "f64 was accepted";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("f64 lives in the reference backend"), std::string::npos) << e.what();
  }
}

TEST(CpuBackend, MatrixProducts) {
  auto backend = cpu_backend(2);
  for (int variant = 0; variant < 8; variant++) {
    const bool ta = variant & 1, tb = variant & 2, add = variant & 4;
    const std::int64_t batch = 2, m = 5, n = 7, k = 3;
    const Values a = random_values(batch * m * k, 1), b = random_values(batch * k * n, 2);
    Values want(batch * m * n, add ? 1.0 : 0.0);
    for (std::int64_t g = 0; g < batch; g++)
      for (std::int64_t i = 0; i < m; i++)
        for (std::int64_t j = 0; j < n; j++)
          for (std::int64_t l = 0; l < k; l++)
            want[(g * m + i) * n + j] +=
                a[g * m * k + (ta ? l * m + i : i * k + l)] * b[g * k * n + (tb ? j * k + l : l * n + j)];
    Tensor x = Tensor::of(*backend, ta ? Shape{batch, k, m} : Shape{batch, m, k}, a),
           w = Tensor::of(*backend, tb ? Shape{batch, n, k} : Shape{batch, k, n}, b),
           c = Tensor::full(*backend, {batch, m, n}, add ? 1 : nan_value);
    backend->gemm(ta, tb, x, w, c, add);
    expect_near(c.values(), want, 1e-5, "gemm");
  }
}

// A weight that counts its writes on its own segment is prepared once per state: a write must be noticed.
TEST(CpuBackend, PreparedWeightsFollowWrites) {
  auto backend = cpu_backend(2);
  Tensor w = Tensor::full(*backend, {16, 3, 3, 16}, 1);
  w.count_on(w.storage()->add_segment("conv.weight"));
  Tensor x = Tensor::full(*backend, {1, 8, 8, 16}, 1), y(*backend, {1, 8, 8, 16});
  ConvShape s{1, 8, 8, 16, 16, 3, 3};
  s.pad_h = s.pad_w = 1;
  backend->conv2d(s, x, w, nullptr, false, y);
  const double first = y.values()[(4 * 8 + 4) * 16];
  w.fill(2);
  backend->conv2d(s, x, w, nullptr, false, y);
  EXPECT_NEAR(first, 144, 0.01);
  EXPECT_NEAR(y.values()[(4 * 8 + 4) * 16], 288, 0.01);
  Tensor bias = Tensor::full(*backend, {16}, -300), dw = Tensor::like(w), dx = Tensor::like(x);
  backend->conv2d(s, x, w, &bias, true, y);
  EXPECT_EQ(y.values()[(4 * 8 + 4) * 16], 0);
  backend->conv2d_backward_filter(s, x, x, dw, false);
  EXPECT_NEAR(dw.values()[4 * 16], 64, 0.01);
  backend->conv2d_backward_data(s, x, w, dx, false);
  EXPECT_NEAR(dx.values()[(4 * 8 + 4) * 16], 288, 0.01);
}

TEST(CpuBackend, Linear) {
  auto backend = cpu_backend(2);
  Tensor x = Tensor::of(*backend, {2, 3}, {1, 2, 3, 4, 5, 6}), w = Tensor::of(*backend, {2, 3}, {1, 0, -1, 2, 1, 0}),
         bias = Tensor::of(*backend, {2}, {0.5, -5}), y(*backend, {2, 2}), dx = Tensor::like(x), dw = Tensor::like(w);
  backend->linear(x, w, &bias, true, y);
  expect_near(y.values(), {0, 0, 0, 8}, 1e-6, "linear");
  backend->linear(x, w, nullptr, false, y);
  expect_near(y.values(), {-2, 4, -2, 13}, 1e-6, "linear without bias");
  backend->linear_backward_data(y, w, dx, false);
  expect_near(dx.values(), {6, 4, 2, 24, 13, 2}, 1e-6, "linear dx");
  backend->linear_backward_weight(x, y, dw, false);
  expect_near(dw.values(), {-10, -14, -18, 56, 73, 90}, 1e-6, "linear dw");
}

}  // namespace
