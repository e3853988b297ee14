// The reference backend, the oracle of the others, is itself checked two ways: values against a second formulation
// written here, and gradients against finite differences in double.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <random>

#include "core/backend.h"

using namespace tandem;

namespace {

constexpr double nan_value = std::numeric_limits<double>::quiet_NaN();

std::unique_ptr<Backend> backend_of(int threads = 2) { return reference_backend(threads); }

Tensor random(Backend& b, const Shape& shape, unsigned seed, DType type = DType::f64, double from = -1, double to = 1) {
  std::mt19937 generator(seed);
  std::uniform_real_distribution<double> uniform(from, to);
  std::vector<double> v(static_cast<std::size_t>(shape.numel()));
  for (double& e : v) e = uniform(generator);
  return Tensor::of(b, shape, v, type);
}

Tensor filled(Backend& b, const Shape& shape, double value, DType type = DType::f64) {
  return Tensor::full(b, shape, value, type);
}

double dot(const Tensor& a, const Tensor& b) {
  const std::vector<double> u = a.values(), v = b.values();
  double sum = 0;
  for (std::size_t i = 0; i < u.size(); i++) sum += u[i] * v[i];
  return sum;
}

void expect_near(const Tensor& got, const std::vector<double>& want, double tolerance, const char* what = "") {
  const std::vector<double> g = got.values();
  ASSERT_EQ(g.size(), want.size()) << what;
  double largest = 1;
  for (double w : want) largest = std::max(largest, std::abs(w));
  for (std::size_t i = 0; i < g.size(); i++) ASSERT_NEAR(g[i], want[i], tolerance * largest) << what << " at " << i;
}

// ∂f/∂x by central differences; x is restored.
std::vector<double> numeric(Tensor& x, const std::function<double()>& f) {
  constexpr double step = 1e-5;
  std::vector<double> gradient;
  for (std::int64_t i = 0; i < x.numel(); i++) {
    const double old = x.data<double>()[i];
    x.write<double>()[i] = old + step;
    const double above = f();
    x.write<double>()[i] = old - step;
    const double below = f();
    x.write<double>()[i] = old;
    gradient.push_back((above - below) / (2 * step));
  }
  return gradient;
}

std::vector<double> plus(std::vector<double> v, double a) {
  for (double& e : v) e += a;
  return v;
}

// Runs backward(dx, add) twice: over NaN, which must not be read, and on top of ones.
void expect_gradient(Backend& b, const Tensor& like, const std::vector<double>& want,
                     const std::function<void(Tensor&, bool)>& backward, const char* what) {
  Tensor fresh = filled(b, like.shape(), nan_value, like.dtype());
  backward(fresh, false);
  expect_near(fresh, want, 1e-8, what);
  Tensor added = filled(b, like.shape(), 1, like.dtype());
  backward(added, true);
  expect_near(added, plus(want, 1), 1e-8, what);
}

}  // namespace

// ---- the backend itself ---------------------------------------------------------------------------------------------

TEST(Reference, DescribesItself) {
  auto b = backend_of(2);
  EXPECT_EQ(b->name(), "reference");
  EXPECT_EQ(b->description(),
            b->threads() == 2 ? "reference loops, 2 threads" : "reference loops, 1 thread");  // no OpenMP
  EXPECT_EQ(backend_of(1)->description(), "reference loops, 1 thread");
  for (DType t : {DType::f32, DType::bf16, DType::f64}) EXPECT_TRUE(b->supports(t));
  for (DType t : {DType::f16, DType::u8, DType::i32}) EXPECT_FALSE(b->supports(t));
  EXPECT_FALSE(b->on_device());
  Tensor a(*b, {2}, DType::i32), c(*b, {1}, DType::i32);
  EXPECT_THROW(b->squared_norm(a, c, false), Error);  // not a floating type
}

// ---- matrices -------------------------------------------------------------------------------------------------------

TEST(Reference, GemmMatchesTheDefinition) {
  auto b = backend_of();
  const std::int64_t batch = 2, m = 5, n = 3, k = 4;
  for (bool ta : {false, true})
    for (bool tb : {false, true})
      for (DType type : {DType::f64, DType::f32}) {
        Tensor a = random(*b, ta ? Shape{batch, k, m} : Shape{batch, m, k}, 1, type);
        Tensor c = random(*b, tb ? Shape{batch, n, k} : Shape{batch, k, n}, 2, type);
        const std::vector<double> av = a.values(), cv = c.values();
        std::vector<double> want;
        for (std::int64_t s = 0; s < batch; s++)
          for (std::int64_t i = 0; i < m; i++)
            for (std::int64_t j = 0; j < n; j++) {
              double sum = 0;
              for (std::int64_t p = 0; p < k; p++)
                sum += av[s * m * k + (ta ? p * m + i : i * k + p)] * cv[s * k * n + (tb ? j * k + p : p * n + j)];
              want.push_back(sum);
            }
        Tensor y = filled(*b, {batch, m, n}, nan_value, type);
        b->gemm(ta, tb, a, c, y, false);
        expect_near(y, want, type == DType::f64 ? 1e-14 : 1e-6);
        b->gemm(ta, tb, a, c, y, true);
        for (double& w : want) w *= 2;
        expect_near(y, want, type == DType::f64 ? 1e-14 : 1e-6);
      }
}

TEST(Reference, LinearAndItsGradients) {
  auto b = backend_of();
  const std::int64_t m = 3, n = 4, k = 5;
  Tensor x = random(*b, {m, k}, 1), w = random(*b, {n, k}, 2), bias = random(*b, {n}, 3), y(*b, {m, n}, DType::f64);
  const std::vector<double> xv = x.values(), wv = w.values(), bv = bias.values();
  std::vector<double> want;
  for (std::int64_t i = 0; i < m; i++)
    for (std::int64_t j = 0; j < n; j++) {
      want.push_back(bv[j]);
      for (std::int64_t p = 0; p < k; p++) want.back() += xv[i * k + p] * wv[j * k + p];
    }
  b->linear(x, w, &bias, false, y);
  expect_near(y, want, 1e-14);
  for (double& v : want) v = std::max(v, 0.0);
  b->linear(x, w, &bias, true, y);
  expect_near(y, want, 1e-14);

  Tensor dy = random(*b, {m, n}, 4);
  const auto f = [&] {
    b->linear(x, w, &bias, false, y);
    return dot(y, dy);
  };
  expect_gradient(
      *b, x, numeric(x, f), [&](Tensor& g, bool add) { b->linear_backward_data(dy, w, g, add); }, "dx");
  expect_gradient(
      *b, w, numeric(w, f), [&](Tensor& g, bool add) { b->linear_backward_weight(x, dy, g, add); }, "dw");
  expect_gradient(
      *b, bias, numeric(bias, f), [&](Tensor& g, bool add) { b->sum_rows(dy, g, add); }, "db");
}

// ---- convolution ----------------------------------------------------------------------------------------------------

namespace {

// clang-format off
const std::vector<ConvShape> convolutions = {
    {.n = 2, .h = 5, .w = 4, .c_in = 2, .c_out = 3, .kh = 3, .kw = 3, .pad_h = 1, .pad_w = 1},
    {.n = 1, .h = 7, .w = 6, .c_in = 2, .c_out = 2, .kh = 3, .kw = 2, .stride_h = 2, .stride_w = 3, .pad_h = 1},
    {.n = 2, .h = 6, .w = 7, .c_in = 4, .c_out = 6, .kh = 2, .kw = 3, .pad_h = 2, .pad_w = 1, .dilation_h = 2,
     .groups = 2},
    {.n = 1, .h = 5, .w = 5, .c_in = 4, .c_out = 4, .kh = 3, .kw = 3, .stride_h = 2, .stride_w = 2, .pad_h = 1,
     .pad_w = 1, .dilation_w = 2, .groups = 4},
    {.n = 2, .h = 3, .w = 3, .c_in = 3, .c_out = 5},
};
// clang-format on

Shape x_shape(const ConvShape& s) { return {s.n, s.h, s.w, s.c_in}; }
Shape w_shape(const ConvShape& s) { return {s.c_out, s.kh, s.kw, s.c_in / s.groups}; }
Shape y_shape(const ConvShape& s) { return {s.n, s.out_h(), s.out_w(), s.c_out}; }

}  // namespace

// A second formulation: every input element is pushed to the outputs it reaches, through a padded copy of the picture.
TEST(Reference, ConvolutionMatchesScatter) {
  auto b = backend_of();
  for (const ConvShape& s : convolutions) {
    Tensor x = random(*b, x_shape(s), 1), w = random(*b, w_shape(s), 2), bias = random(*b, {s.c_out}, 3),
           y(*b, y_shape(s), DType::f64);
    const std::vector<double> xv = x.values(), wv = w.values(), bv = bias.values();
    const std::int64_t H = s.h + 2 * s.pad_h, W = s.w + 2 * s.pad_w, in = s.c_in / s.groups, out = s.c_out / s.groups;
    std::vector<double> padded(s.n * H * W * s.c_in, 0.0), want(s.y_numel());
    for (std::int64_t i = 0; i < s.x_numel(); i++) {
      const std::int64_t c = i % s.c_in, ix = i / s.c_in % s.w, iy = i / s.c_in / s.w % s.h, n = i / s.c_in / s.w / s.h;
      padded[((n * H + iy + s.pad_h) * W + ix + s.pad_w) * s.c_in + c] = xv[i];
    }
    for (std::int64_t i = 0; i < s.y_numel(); i++) want[i] = bv[i % s.c_out];
    for (std::int64_t i = 0; i < s.w_numel(); i++) {
      const std::int64_t c = i % in, kx = i / in % s.kw, ky = i / in / s.kw % s.kh, o = i / in / s.kw / s.kh;
      for (std::int64_t p = 0; p < s.n * s.out_h() * s.out_w(); p++) {
        const std::int64_t ox = p % s.out_w(), oy = p / s.out_w() % s.out_h(), n = p / s.out_w() / s.out_h();
        want[p * s.c_out + o] +=
            wv[i] *
            padded[((n * H + oy * s.stride_h + ky * s.dilation_h) * W + ox * s.stride_w + kx * s.dilation_w) * s.c_in +
                   o / out * in + c];
      }
    }
    b->conv2d(s, x, w, &bias, false, y);
    expect_near(y, want, 1e-13);
    for (double& v : want) v = std::max(v, 0.0);
    b->conv2d(s, x, w, &bias, true, y);
    expect_near(y, want, 1e-13);
  }
}

TEST(Reference, ConvolutionGradients) {
  auto b = backend_of();
  for (const ConvShape& s : convolutions) {
    Tensor x = random(*b, x_shape(s), 1), w = random(*b, w_shape(s), 2), y(*b, y_shape(s), DType::f64);
    Tensor dy = random(*b, y_shape(s), 3);
    const auto f = [&] {
      b->conv2d(s, x, w, nullptr, false, y);
      return dot(y, dy);
    };
    expect_gradient(
        *b, x, numeric(x, f), [&](Tensor& g, bool add) { b->conv2d_backward_data(s, dy, w, g, add); }, "dx");
    expect_gradient(
        *b, w, numeric(w, f), [&](Tensor& g, bool add) { b->conv2d_backward_filter(s, x, dy, g, add); }, "dw");
  }
}

// Bit for bit the same, run after run, and no memory kept.
TEST(Reference, ConvolutionIsReproducible) {
  auto b = backend_of();
  const ConvShape s{.n = 8, .h = 12, .w = 12, .c_in = 8, .c_out = 24, .kh = 3, .kw = 3, .pad_h = 1, .pad_w = 1};
  Tensor x = random(*b, x_shape(s), 1, DType::f32), dy = random(*b, y_shape(s), 2, DType::f32);
  Tensor first(*b, w_shape(s)), again(*b, w_shape(s));
  const std::uint64_t blocks = b->memory().statistics().live_blocks;
  b->conv2d_backward_filter(s, x, dy, first, false);
  for (int i = 0; i < 3; i++) {
    b->conv2d_backward_filter(s, x, dy, again, false);
    EXPECT_EQ(first.values(), again.values());
  }
  EXPECT_EQ(b->memory().statistics().live_blocks, blocks);
}

// ---- pooling --------------------------------------------------------------------------------------------------------

TEST(Reference, MaxPoolByHand) {
  auto b = backend_of();
  const PoolShape s{.n = 1, .h = 3, .w = 3, .c = 1, .kh = 2, .kw = 2, .stride_h = 1, .stride_w = 1};
  Tensor x = Tensor::of(*b, {1, 3, 3, 1}, {-1, 5, 5, -2, 4, 5, -3, -4, -5}, DType::f64);
  Tensor y(*b, {1, 2, 2, 1}, DType::f64), argmax(*b, {1, 2, 2, 1}, DType::u8), dx = filled(*b, x.shape(), nan_value);
  b->max_pool(s, x, false, y, &argmax);
  EXPECT_EQ(y.values(), (std::vector<double>{5, 5, 4, 5}));
  EXPECT_EQ(argmax.values(), (std::vector<double>{1, 0, 1, 1}));  // the first of equals
  Tensor dy = Tensor::of(*b, {1, 2, 2, 1}, {1, 10, 100, 1000}, DType::f64);
  b->max_pool_backward(s, dy, argmax, dx, false);
  EXPECT_EQ(dx.values(), (std::vector<double>{0, 11, 0, 0, 100, 1000, 0, 0, 0}));  // overlapping windows add

  Tensor negative = filled(*b, x.shape(), -1);
  b->max_pool(s, negative, true, y, &argmax);
  EXPECT_EQ(y.values(), (std::vector<double>(4, 0)));
  EXPECT_EQ(argmax.values(), (std::vector<double>(4, 255)));
  b->max_pool_backward(s, dy, argmax, dx, false);
  EXPECT_EQ(dx.values(), (std::vector<double>(9, 0)));
  b->max_pool(s, filled(*b, x.shape(), 0), true, y, &argmax);  // zero is cut: relu has no gradient there
  EXPECT_EQ(argmax.values(), (std::vector<double>(4, 255)));
}

TEST(Reference, MaxPoolKeepsNaN) {
  auto b = backend_of();
  const PoolShape s{.n = 1, .h = 2, .w = 6, .c = 1};
  // A NaN first, last, and after a larger number; with and without relu.
  Tensor x = Tensor::of(*b, {1, 2, 6, 1}, {nan_value, 1, -1, -2, 9, 1, 2, 3, -3, nan_value, nan_value, 8}, DType::f64);
  for (DType type : {DType::f64, DType::f32, DType::bf16})
    for (bool relu : {false, true}) {
      Tensor y(*b, {1, 1, 3, 1}, type), argmax(*b, {1, 1, 3, 1}, DType::u8);
      b->max_pool(s, x.cast(type), relu, y, &argmax);
      for (double v : y.values()) EXPECT_TRUE(std::isnan(v));
      EXPECT_EQ(argmax.values(), (std::vector<double>{0, 3, 2}));
    }
}

TEST(Reference, PoolingGradients) {
  auto b = backend_of();
  // clang-format off
  const std::vector<PoolShape> shapes = {
      {.n = 2, .h = 4, .w = 6, .c = 3},
      {.n = 2, .h = 6, .w = 5, .c = 2, .kh = 3, .kw = 3, .stride_h = 2, .stride_w = 1, .pad_h = 1, .pad_w = 1},
      {.n = 1, .h = 5, .w = 7, .c = 1, .kh = 2, .kw = 3, .stride_h = 3, .stride_w = 2, .pad_w = 1},
      {.n = 2, .h = 3, .w = 4, .c = 2, .kh = 3, .kw = 4, .stride_h = 1, .stride_w = 1},  // global
  };
  // clang-format on
  for (const PoolShape& s : shapes) {
    Tensor x = random(*b, {s.n, s.h, s.w, s.c}, 1), y(*b, {s.n, s.out_h(), s.out_w(), s.c}, DType::f64);
    Tensor dy = random(*b, y.shape(), 2), argmax(*b, y.shape(), DType::u8);
    for (bool relu : {false, true}) {
      const auto largest = [&] {
        b->max_pool(s, x, relu, y, nullptr);
        return dot(y, dy);
      };
      const std::vector<double> want = numeric(x, largest);
      b->max_pool(s, x, relu, y, &argmax);
      expect_gradient(
          *b, x, want, [&](Tensor& g, bool add) { b->max_pool_backward(s, dy, argmax, g, add); }, "max");
    }
    const auto average = [&] {
      b->average_pool(s, x, y);
      return dot(y, dy);
    };
    expect_gradient(
        *b, x, numeric(x, average), [&](Tensor& g, bool add) { b->average_pool_backward(s, dy, g, add); }, "average");
  }
}

TEST(Reference, AveragePoolCountsOnlyThePicture) {
  auto b = backend_of();
  const PoolShape s{
      .n = 1, .h = 2, .w = 2, .c = 1, .kh = 2, .kw = 2, .stride_h = 2, .stride_w = 2, .pad_h = 1, .pad_w = 1};
  Tensor x = Tensor::of(*b, {1, 2, 2, 1}, {1, 2, 3, 4}, DType::f64), y(*b, {1, 2, 2, 1}, DType::f64);
  b->average_pool(s, x, y);
  EXPECT_EQ(y.values(), (std::vector<double>{1, 2, 3, 4}));
}

// ---- batch normalisation --------------------------------------------------------------------------------------------

namespace {

struct Norm {
  Backend& b;
  NormShape s;
  DType type;
  Tensor x, residual, gamma, beta, running_mean, running_variance, y, mean, inverse;
  Norm(Backend& backend, std::int64_t rows, std::int64_t channels, bool relu, DType t = DType::f64)
      : b(backend), s{.rows = rows, .channels = channels, .epsilon = 1e-3, .relu = relu}, type(t) {
    const DType p = t == DType::f64 ? DType::f64 : DType::f32;
    x = random(b, {rows, channels}, 1, t, -2, 3);
    residual = random(b, {rows, channels}, 2, t);
    gamma = random(b, {channels}, 3, p);
    beta = random(b, {channels}, 4, p);
    running_mean = filled(b, {channels}, 10, p);
    running_variance = filled(b, {channels}, 20, p);
    y = filled(b, {rows, channels}, nan_value, t);
    mean = filled(b, {channels}, nan_value, p);
    inverse = filled(b, {channels}, nan_value, p);
  }
  void forward(const Tensor* r) {
    b.batch_norm(s, x, r, gamma, beta, running_mean, running_variance, y, mean, inverse);
  }
};

}  // namespace

TEST(Reference, BatchNormStatistics) {
  auto b = backend_of();
  for (DType type : {DType::f64, DType::f32, DType::bf16}) {
    Norm t(*b, 600, 70, true, type);  // enough for two threads
    t.forward(&t.residual);
    const std::vector<double> x = t.x.values(), r = t.residual.values(), gamma = t.gamma.values(),
                              beta = t.beta.values();
    std::vector<double> mean(70), inverse(70), running_mean(70), running_variance(70), y(600 * 70);
    for (std::size_t c = 0; c < 70; c++) {
      double sum = 0, squares = 0;
      for (std::size_t i = 0; i < 600; i++) sum += x[i * 70 + c], squares += x[i * 70 + c] * x[i * 70 + c];
      mean[c] = sum / 600;
      const double variance = squares / 600 - mean[c] * mean[c];
      inverse[c] = 1 / std::sqrt(variance + 1e-3);
      running_mean[c] = 0.9 * 10 + 0.1 * mean[c];
      running_variance[c] = 0.9 * 20 + 0.1 * variance * 600 / 599;
      for (std::size_t i = 0; i < 600; i++)
        y[i * 70 + c] = std::max(0.0, (x[i * 70 + c] - mean[c]) * inverse[c] * gamma[c] + beta[c] + r[i * 70 + c]);
    }
    const double rounding = type == DType::f64 ? 1e-13 : 2e-7;
    expect_near(t.mean, mean, rounding, "mean");
    expect_near(t.inverse, inverse, rounding, "inverse standard deviation");
    expect_near(t.running_mean, running_mean, rounding, "running mean");
    expect_near(t.running_variance, running_variance, rounding, "running variance");
    expect_near(t.y, y, type == DType::bf16 ? 4e-3 : rounding, "y");

    // For evaluation: the same formula with given statistics.
    Tensor variance = t.inverse.clone(), inferred = filled(*b, t.y.shape(), nan_value, type);
    for (std::int64_t c = 0; c < 70; c++) {
      const double v = 1 / inverse[c] / inverse[c] - 1e-3;
      if (type == DType::f64)
        variance.write<double>()[c] = v;
      else
        variance.write<float>()[c] = static_cast<float>(v);
    }
    b->batch_norm_inference(t.s, t.x, &t.residual, t.gamma, t.beta, t.mean, variance, inferred);
    expect_near(inferred, y, type == DType::bf16 ? 4e-3 : type == DType::f32 ? 1e-6 : 1e-12, "inference");
  }
}

TEST(Reference, BatchNormGradients) {
  auto b = backend_of();
  for (bool relu : {false, true})
    for (bool with_residual : {false, true}) {
      Norm t(*b, 7, 3, relu);
      const Tensor* residual = with_residual ? &t.residual : nullptr;
      Tensor dy = random(*b, t.y.shape(), 5);
      const auto f = [&] {
        t.forward(residual);
        return dot(t.y, dy);
      };
      const std::vector<double> dx = numeric(t.x, f), dgamma = numeric(t.gamma, f), dbeta = numeric(t.beta, f);
      const std::vector<double> dresidual = with_residual ? numeric(t.residual, f) : std::vector<double>{};
      t.forward(residual);
      const Tensor* y = with_residual && relu ? &t.y : nullptr;
      for (bool add : {false, true}) {
        const double old = add ? 1 : nan_value, start = add ? 1 : 0;
        Tensor gx = filled(*b, t.x.shape(), old), gr = filled(*b, t.x.shape(), old), gg = filled(*b, {3}, old),
               gb = filled(*b, {3}, old);
        b->batch_norm_backward(t.s, t.x, y, dy, t.gamma, t.beta, t.mean, t.inverse,
                               {.dx = &gx,
                                .dresidual = with_residual ? &gr : nullptr,
                                .dgamma = &gg,
                                .dbeta = &gb,
                                .add_dx = add,
                                .add_dresidual = add,
                                .add_dgamma = add,
                                .add_dbeta = add});
        expect_near(gx, plus(dx, start), 1e-7, "dx");
        expect_near(gg, plus(dgamma, start), 1e-7, "dgamma");
        expect_near(gb, plus(dbeta, start), 1e-7, "dbeta");
        if (with_residual) expect_near(gr, plus(dresidual, start), 1e-7, "dresidual");
      }
      // Each output alone, and dresidual in the place of dy.
      Tensor gb = filled(*b, {3}, nan_value);
      b->batch_norm_backward(t.s, t.x, y, dy, t.gamma, t.beta, t.mean, t.inverse, {.dbeta = &gb});
      expect_near(gb, dbeta, 1e-7, "dbeta alone");
      if (with_residual) {
        Tensor in_place = dy.clone(), gx = filled(*b, t.x.shape(), nan_value);
        b->batch_norm_backward(t.s, t.x, y, in_place, t.gamma, t.beta, t.mean, t.inverse,
                               {.dx = &gx, .dresidual = &in_place});
        expect_near(gx, dx, 1e-7, "dx beside dresidual in place");
        expect_near(in_place, dresidual, 1e-7, "dresidual in place");
      }
    }
}

// ---- rows and reductions --------------------------------------------------------------------------------------------

TEST(Reference, Reduce) {
  auto b = backend_of();
  Tensor x = Tensor::of(*b, {2, 3, 2}, {1, 2, 3, nan_value, 5, 6, -7, -8, -9, -10, -11, -12}, DType::f64),
         y = filled(*b, {2, 2}, nan_value);
  b->reduce(Reduction::sum, 2, 3, 2, x, y, false);
  std::vector<double> v = y.values();
  EXPECT_EQ(v[0], 9);
  EXPECT_TRUE(std::isnan(v[1]));
  EXPECT_EQ(v[2], -27);
  EXPECT_EQ(v[3], -30);
  b->reduce(Reduction::max, 2, 3, 2, x, y, false);
  v = y.values();
  EXPECT_EQ(v[0], 5);
  EXPECT_TRUE(std::isnan(v[1]));  // although 6 comes later
  EXPECT_EQ(v[2], -7);
  EXPECT_EQ(v[3], -8);
  Tensor one = filled(*b, {1}, 100);
  b->reduce(Reduction::sum, 1, 2, 1, Tensor::of(*b, {2}, {1, 2}, DType::f64), one, true);
  EXPECT_EQ(one.item(), 103);

  // Sums are kept in double: 2²⁴ + 1 + … + 1 would stand still in float.
  Tensor ones = Tensor::full(*b, {1001}, 1), total(*b, {1});
  ones.write<float>()[0] = 16777216;
  b->reduce(Reduction::sum, 1, 1001, 1, ones, total, false);
  EXPECT_EQ(total.item(), 16778216);
  b->sum_rows(ones.reshape({1001, 1}), total, false);
  EXPECT_EQ(total.item(), 16778216);
}

TEST(Reference, SquaredNorm) {
  auto b = backend_of();
  const double inf = std::numeric_limits<double>::infinity();
  for (DType type : {DType::f64, DType::f32, DType::bf16}) {
    Tensor x = random(*b, {70001}, 1, type);  // enough for two threads
    Tensor y = filled(*b, {1}, nan_value, type == DType::f64 ? DType::f64 : DType::f32);
    const double want = dot(x, x);
    b->squared_norm(x, y, false);
    EXPECT_NEAR(y.item(), want, 1e-7 * want);
    b->squared_norm(x, y, true);
    EXPECT_NEAR(y.item(), 2 * want, 2e-7 * want);
    b->squared_norm(Tensor::of(*b, {3}, {1, -inf, inf}, type), y, false);
    EXPECT_EQ(y.item(), inf);
    b->squared_norm(Tensor::of(*b, {3}, {inf, nan_value, 1}, type), y, false);
    EXPECT_TRUE(std::isnan(y.item()));
  }
  Tensor y(*b, {1});
  b->squared_norm(Tensor::of(*b, {2}, {1e30, 1}), y, false);
  EXPECT_EQ(y.item(), inf);
}

TEST(Reference, CrossEntropy) {
  auto b = backend_of();
  Tensor x = random(*b, {4, 5}, 1, DType::f64, -2, 2), labels = Tensor::of(*b, {4}, {0, 4, 2, 2}, DType::i32);
  Tensor loss = filled(*b, {1}, nan_value), p = filled(*b, {4, 5}, nan_value), dloss = filled(*b, {1}, 0.7);
  for (double smoothing : {0.0, 0.1}) {
    const std::vector<double> xv = x.values(), label = labels.values();
    double want = 0;
    for (std::size_t r = 0; r < 4; r++) {
      double sum = 0;
      for (std::size_t c = 0; c < 5; c++) sum += std::exp(xv[r * 5 + c]);
      for (std::size_t c = 0; c < 5; c++) {
        const double q = (c == static_cast<std::size_t>(label[r]) ? 1 - smoothing : 0) + smoothing / 5;
        want -= q * std::log(std::exp(xv[r * 5 + c]) / sum) / 4;
      }
    }
    const auto f = [&] {
      b->cross_entropy(x, labels, smoothing, loss, p, nullptr);
      return 0.7 * loss.item();
    };
    EXPECT_NEAR(f(), 0.7 * want, 1e-14);
    const std::vector<double> dx = numeric(x, f);
    f();
    expect_gradient(
        *b, x, dx, [&](Tensor& g, bool add) { b->cross_entropy_backward(p, labels, smoothing, dloss, g, add); }, "dx");
  }
}

TEST(Reference, CrossEntropyCountsAndRefuses) {
  auto b = backend_of();
  // Right; wrong; a tie, which the first class wins; NaN, never right; −∞ elsewhere, which must not make the loss NaN.
  const double inf = std::numeric_limits<double>::infinity();
  Tensor x = Tensor::of(*b, {6, 2}, {1, 2, 1, 2, 3, 3, 3, 3, 1, nan_value, 1, -inf});
  Tensor labels = Tensor::of(*b, {6}, {1, 0, 0, 1, 0, 0}, DType::i32), loss(*b, {1}), p(*b, {6, 2});
  Tensor correct = Tensor::full(*b, {1}, 40, DType::i32);
  b->cross_entropy(x, labels, 0, loss, p, &correct);
  EXPECT_EQ(correct.item(), 43);
  EXPECT_TRUE(std::isnan(loss.item()));
  Tensor last = p.slice(5, 6);
  b->cross_entropy(x.slice(5, 6), labels.slice(5, 6), 0, loss, last, nullptr);
  EXPECT_EQ(loss.item(), 0);

  for (int bad : {-1, 2}) {
    labels.write<std::int32_t>()[3] = bad;
    try {
      b->cross_entropy(x, labels, 0, loss, p, nullptr);
      FAIL() << "the label " << bad << " was accepted";
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find("row 3 has the label " + std::to_string(bad)), std::string::npos)
          << e.what();
    }
  }
}

TEST(Reference, ReluKeepsNaN) {
  auto b = backend_of();
  for (DType type : {DType::f64, DType::f32, DType::bf16}) {
    const DType parameter = type == DType::f64 ? DType::f64 : DType::f32;
    Tensor x = filled(*b, {1, 1, 1, 1}, nan_value, type), w = filled(*b, {1, 1, 1, 1}, 1, parameter),
           y(*b, {1, 1, 1, 1}, type);
    b->conv2d({.n = 1, .h = 1, .w = 1, .c_in = 1, .c_out = 1}, x, w, nullptr, true, y);
    EXPECT_TRUE(std::isnan(y.item()));
    Tensor z(*b, {1, 1}, type);
    b->linear(x.reshape({1, 1}), w.reshape({1, 1}), nullptr, true, z);
    EXPECT_TRUE(std::isnan(z.item()));
  }
}

// Loops over enough elements for two threads give what one thread gives.
TEST(Reference, ThreadsAgree) {
  auto one = backend_of(1), two = backend_of(2);
  std::vector<double> results[2];
  for (int i = 0; i < 2; i++) {
    Backend& b = i ? *two : *one;
    const PoolShape s{
        .n = 3, .h = 32, .w = 32, .c = 16, .kh = 3, .kw = 3, .stride_h = 2, .stride_w = 2, .pad_h = 1, .pad_w = 1};
    Tensor x = random(b, {3, 32, 32, 16}, 1, DType::f32), y(b, {3, 16, 16, 16}), argmax(b, y.shape(), DType::u8);
    Tensor average(b, y.shape()), dx(b, x.shape()), sum(b, {16}), largest(b, {3, 1024});
    b.max_pool(s, x, false, y, &argmax);
    b.average_pool(s, x, average);
    b.max_pool_backward(s, y, argmax, dx, false);
    b.average_pool_backward(s, average, dx, true);
    b.sum_rows(x, sum, false);
    b.reduce(Reduction::max, 3 * 1024, 16, 1, x, largest, false);
    for (const Tensor& t : {y, average, dx, sum, largest})
      for (double v : t.values()) results[i].push_back(v);
  }
  EXPECT_EQ(results[0], results[1]);
}
