// The memory-bound operations of the cpu backend against the reference backend in double: every operation in f32 and
// bf16, on one thread and two, with row and channel counts that fill no vector, overlapping and padded windows, adding,
// NaN.
#include <random>

#include "autograd/ops.h"
#include "tests/support.h"

namespace tandem::test {
namespace {

const double nan_value = std::numeric_limits<double>::quiet_NaN(), infinity = std::numeric_limits<double>::infinity();

// Random numbers as the type keeps them, so that both backends start from the same values.
Numbers random_values(std::int64_t n, unsigned seed, double mean = 0, double std = 1, DType type = DType::f32) {
  std::mt19937 engine(seed);
  std::normal_distribution<double> normal(mean, std);
  Numbers v(n);
  for (double& d : v) {
    const float f = static_cast<float>(normal(engine));
    d = type == DType::bf16 ? static_cast<float>(bf16(f)) : f;
  }
  return v;
}

// |got − want| ≤ tolerance·(scale + |want|); NaN and infinities must agree.
void expect_near(const Numbers& got, const Numbers& want, double tolerance, const std::string& what, double scale = 1) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (std::size_t i = 0; i < got.size(); i++) {
    if (std::isnan(want[i]) ? std::isnan(got[i]) : got[i] == want[i]) continue;
    ASSERT_LE(std::abs(got[i] - want[i]), tolerance * (scale + std::abs(want[i])))
        << what << ": element " << i << " is " << got[i] << ", expected " << want[i];
  }
}
void expect_near(const Tensor& got, const Tensor& want, double tolerance, const std::string& what, double scale = 1) {
  expect_near(got.values(), want.values(), tolerance, what, scale);
}

// A backend and the types in which it computes.
struct Side {
  Backend& b;
  DType pictures, parameters;
  Tensor picture(const Numbers& v) const { return Tensor::of(b, {std::int64_t(v.size())}, v, pictures); }
  Tensor parameter(const Numbers& v) const { return Tensor::of(b, {std::int64_t(v.size())}, v, parameters); }
};
using Results = std::vector<Tensor>;

struct CpuKernels : testing::TestWithParam<std::tuple<DType, int>> {  // and threads
  void SetUp() override {
    if (!backend->supports(type)) GTEST_SKIP() << "no " << name_of(type) << " on this CPU";
  }
  Side mine() { return {*backend, type, DType::f32}; }
  Side exact() { return {*reference, DType::f64, DType::f64}; }
  // What the kernel gives on the backend, twice the same bits, and what it gives in double.
  std::pair<Results, Results> on_both(const std::function<Results(const Side&)>& kernel) {
    const Results got = kernel(mine()), again = kernel(mine());
    for (std::size_t i = 0; i < got.size(); i++)
      EXPECT_TRUE(bytes_of(got[i]) == bytes_of(again[i])) << "the second run gave other bits in result " << i;
    return {got, kernel(exact())};
  }
  Numbers random(std::int64_t n, unsigned seed, double mean = 0, double std = 1) {
    return random_values(n, seed, mean, std, type);
  }
  // A result of the picture's type may be off by its rounding; f32 by the order of its sums.
  double tolerance() const { return type == DType::bf16 ? 1.0 / 128 : 2e-5; }
  DType type = std::get<0>(GetParam());
  std::unique_ptr<Backend> backend = cpu_backend(std::get<1>(GetParam())), reference = reference_backend(2);
};

const std::int64_t row_counts[] = {1, 7, 1000}, channel_counts[] = {1, 3, 6, 10, 16, 17, 64};

// Calls f for every combination of rows and channels, and for one that is large enough to be shared by threads.
void for_shapes(const std::function<void(std::int64_t, std::int64_t)>& f) {
  for (std::int64_t rows : row_counts)
    for (std::int64_t c : channel_counts) f(rows, c);
  f(2001, 17);
  f(101, 512);
}

// ---- batch normalisation --------------------------------------------------------------------------------------------
struct NormParameters {
  Numbers gamma, beta, running_mean, running_variance;
  static NormParameters plain(std::int64_t channels) {
    return {Numbers(channels, 1), Numbers(channels, 0), Numbers(channels, 0), Numbers(channels, 1)};
  }
};
// y, mean, inverse standard deviation, running mean, running variance.
Results normed(const Side& on, const NormShape& s, const Tensor& x, const Tensor* residual, const NormParameters& p) {
  Tensor gamma = on.parameter(p.gamma), beta = on.parameter(p.beta), y = Tensor::like(x), mean = Tensor::like(gamma),
         inverse = Tensor::like(gamma), running_mean = on.parameter(p.running_mean),
         running_variance = on.parameter(p.running_variance);
  on.b.batch_norm(s, x, residual, gamma, beta, running_mean, running_variance, y, mean, inverse);
  return {y, mean, inverse, running_mean, running_variance};
}
NormParameters random_parameters(std::int64_t channels) {
  return {random_values(channels, 3, 1, 0.2), random_values(channels, 4), random_values(channels, 5),
          Numbers(channels, 1.5)};
}

TEST_P(CpuKernels, BatchNormForward) {
  for_shapes([&](std::int64_t rows, std::int64_t channels) {
    for (int variant = 0; variant < 4; variant++) {
      const NormShape s{.rows = rows, .channels = channels, .relu = bool(variant & 1)};
      const Numbers x = random(rows * channels, 1, 0.5, 2), residual = random(rows * channels, 2);
      const NormParameters p = random_parameters(channels);
      const auto [got, want] = on_both([&](const Side& on) {
        const Tensor tx = on.picture(x), tr = on.picture(residual), *r = variant & 2 ? &tr : nullptr;
        Results all = normed(on, s, tx, r, p);
        all.push_back(Tensor::like(tx));
        on.b.batch_norm_inference(s, tx, r, on.parameter(p.gamma), on.parameter(p.beta), on.parameter(p.running_mean),
                                  on.parameter(p.running_variance), all.back());
        return all;
      });
      const std::string what = "batch norm " + std::to_string(rows) + "×" + std::to_string(channels);
      const Numbers mean = want[1].values(), inverse = want[2].values();
      double scale = 2;  // where the variance is next to nothing, the rounding of the mean shows
      for (std::size_t c = 0; c < mean.size(); c++) scale = std::max(scale, std::abs(mean[c] * inverse[c]) / 50);
      expect_near(got[0], want[0], tolerance(), what + " y", scale);
      expect_near(got[1], want[1], 2e-6, what + " mean");
      if (rows > 1) expect_near(got[2], want[2], 1e-5, what + " inverse standard deviation");
      expect_near(got[3], want[3], 2e-6, what + " running mean");
      expect_near(got[4], want[4], 1e-5, what + " running variance");
      expect_near(got[5], want[5], tolerance(), what + " inference", 2);
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
    const Numbers weights = random_values(c.w_numel(), 2, 0.05, 0.1);
    Tensor x = Tensor::of(*backend, {c.n, c.h, c.w, c.c_in}, random(c.x_numel(), 1, 2), type);
    Tensor w = Tensor::of(*backend, {c.c_out, 3, 3, c.c_in}, weights), y(*backend, {c.n, c.h, c.w, c.c_out}, type);
    const NormShape s{c.n * c.h * c.w, c.c_out};
    const NormParameters plain = NormParameters::plain(c.c_out);
    for (bool changed : {false, true}) {
      backend->conv2d(c, x, w, nullptr, false, y);
      if (changed) y.copy_from(Tensor::of(*backend, y.shape(), random(y.numel(), 3), type));
      const Results got = normed(mine(), s, y, nullptr, plain);
      const Results want = normed(exact(), s, exact().picture(y.values()), nullptr, plain);
      const std::string what = std::to_string(c.c_in) + " channels" + (changed ? ", changed" : "");
      // The sums are of f32 values, before they are rounded to bf16
      const double near = type == DType::bf16 ? 1e-2 : 1e-5;
      expect_near(got[1], want[1], near, what + " mean");
      expect_near(got[2], want[2], near, what + " inverse standard deviation", 0);
      expect_near(got[4], want[4], 2 * near, what + " running variance", 0);
      expect_near(got[0], want[0], tolerance(), what + " y", 2);
    }
  }
}

// The variance of numbers far from zero: 1000 ± 1, and 1000 ± 1 after a first picture of zeros.
TEST_P(CpuKernels, BatchNormLargeMean) {
  if (type == DType::bf16) GTEST_SKIP() << "bf16 does not hold such numbers";
  for (bool zeros_first : {false, true}) {
    NormShape s{8000, 16};
    s.momentum = 1;
    Numbers x = random(s.rows * s.channels, 1, 1000, 1);
    if (zeros_first) std::fill_n(x.begin(), 160 * 16, 0.0);
    const auto [got, want] =
        on_both([&](const Side& on) { return normed(on, s, on.picture(x), nullptr, NormParameters::plain(16)); });
    expect_near(got[4], want[4], 1e-4, "variance", 0);
    expect_near(got[1], want[1], 1e-6, "mean", 0);
    expect_near(got[0], want[0], 3e-4, "y");
  }
}

TEST_P(CpuKernels, BatchNormNaN) {
  NormShape s{50, 6};
  s.relu = true;
  Numbers x = random(300, 1);
  x[6 * 20 + 3] = nan_value;
  const Numbers y = normed(mine(), s, mine().picture(x), nullptr, NormParameters::plain(6))[0].values();
  for (std::int64_t i = 0; i < 300; i++) EXPECT_EQ(std::isnan(y[i]), i % 6 == 3) << i;
}

TEST_P(CpuKernels, BatchNormBackward) {
  for_shapes([&](std::int64_t rows, std::int64_t channels) {
    // relu, residual (with y for the mask), add, dresidual in place of dy
    for (int variant = 0; variant < 16; variant++) {
      const bool with_residual = variant & 2, add = variant & 4, in_place = variant & 8;
      if (in_place && (!with_residual || add)) continue;
      const NormShape s{.rows = rows, .channels = channels, .relu = bool(variant & 1)};
      const std::int64_t n = rows * channels;
      const Numbers x = random(n, 1, 0.5, 2), dy = random(n, 3), old = random(n, 4);
      const NormParameters p = random_parameters(channels);
      const Tensor residual = mine().picture(random(n, 2));
      const Results forward = normed(mine(), s, mine().picture(x), with_residual ? &residual : nullptr, p);
      const Numbers y = forward[0].values(), mean = forward[1].values(), inverse = forward[2].values();
      // Not added to: old contents must not be read, so they are NaN.
      const Numbers before = add ? old : Numbers(n, nan_value), parameter_before(channels, add ? 0.25 : nan_value);
      const auto backward = [&](const Side& on, Tensor& gradient, const Backend::NormGradients& out) {
        // In double y is the mask in any case: near 0 another rounding has another sign.
        const Tensor ty = on.picture(y), *mask = with_residual || &on.b == reference.get() ? &ty : nullptr;
        on.b.batch_norm_backward(s, on.picture(x), mask, gradient, on.parameter(p.gamma), on.parameter(p.beta),
                                 on.parameter(mean), on.parameter(inverse), out);
      };
      const auto [got, want] = on_both([&](const Side& on) {
        Tensor gradient = on.picture(dy), dx = on.picture(before), dr = on.picture(before),
               dg = on.parameter(parameter_before), db = on.parameter(parameter_before);
        Backend::NormGradients out;
        out.dx = &dx, out.dgamma = &dg, out.dbeta = &db;
        if (with_residual) out.dresidual = in_place ? &gradient : &dr;
        out.add_dx = out.add_dresidual = out.add_dgamma = out.add_dbeta = add;
        backward(on, gradient, out);
        return Results{dx, dg, db, in_place ? gradient : dr};
      });
      const std::string what = "batch norm backward " + std::to_string(rows) + "×" + std::to_string(channels) +
                               " variant " + std::to_string(variant);
      double scale = 1;  // the terms of dx cancel where the variance is next to nothing
      for (double v : inverse) scale = std::max(scale, v);
      expect_near(got[0], want[0], tolerance(), what + " dx", scale);
      expect_near(got[1], want[1], 1e-5, what + " dgamma", std::sqrt(double(rows)));
      expect_near(got[2], want[2], 1e-5, what + " dbeta", std::sqrt(double(rows)));
      if (with_residual) expect_near(got[3], want[3], tolerance(), what + " dresidual");
      if (variant != 3) continue;
      const auto alone = on_both([&](const Side& on) {
        Tensor gradient = on.picture(dy), dr = on.picture(before), db = on.parameter(parameter_before);
        backward(on, gradient, {.dresidual = &dr});
        backward(on, gradient, {.dbeta = &db});
        return Results{dr, db};
      });
      expect_near(alone.first[0], alone.second[0], tolerance(), what + " dresidual alone");
      expect_near(alone.first[1], alone.second[1], 1e-5, what + " dbeta alone", std::sqrt(double(rows)));
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

TEST_P(CpuKernels, MaxPool) {
  for (const PoolShape& s : pool_shapes())
    for (bool relu : {false, true})
      for (bool add : {false, true}) {
        const std::int64_t nx = s.n * s.h * s.w * s.c, ny = s.n * s.out_h() * s.out_w() * s.c;
        Numbers x = random(nx, 1, -0.3);
        for (double& v : x) v = std::round(v * 4) / 4;  // many ties: the first must win
        x[nx / 2] = nan_value;
        const Numbers dy = random(ny, 2), before = add ? random(nx, 3) : Numbers(nx, nan_value);
        const auto [got, want] = on_both([&](const Side& on) {
          Tensor y(on.b, {ny}, on.pictures), without(on.b, {ny}, on.pictures), argmax(on.b, {ny}, DType::u8),
              dx = on.picture(before);
          on.b.max_pool(s, on.picture(x), relu, y, &argmax);
          on.b.max_pool(s, on.picture(x), relu, without, nullptr);
          on.b.max_pool_backward(s, on.picture(dy), argmax, dx, add);
          return Results{y, without, argmax, dx};
        });
        for (int i : {0, 1, 2}) expect_near(got[i], want[i], 0, describe(s) + (i < 2 ? " y" : " argmax"));
        expect_near(got[3], want[3], tolerance(), describe(s) + " dx");
      }
}

TEST_P(CpuKernels, AveragePool) {
  for (const PoolShape& s : pool_shapes())
    for (bool add : {false, true}) {
      const std::int64_t nx = s.n * s.h * s.w * s.c, ny = s.n * s.out_h() * s.out_w() * s.c;
      const Numbers x = random(nx, 1), dy = random(ny, 2), before = add ? random(nx, 3) : Numbers(nx, nan_value);
      const auto [got, want] = on_both([&](const Side& on) {
        Tensor y(on.b, {ny}, on.pictures), dx = on.picture(before);
        on.b.average_pool(s, on.picture(x), y);
        on.b.average_pool_backward(s, on.picture(dy), dx, add);
        return Results{y, dx};
      });
      expect_near(got[0], want[0], tolerance(), describe(s));
      expect_near(got[1], want[1], tolerance(), describe(s) + " dx");
    }
}

// ---- rows and reductions --------------------------------------------------------------------------------------------
TEST_P(CpuKernels, SumRows) {
  auto check = [&](std::int64_t rows, std::int64_t channels) {
    const Numbers dy = random(rows * channels, 1, 0.1);
    for (bool add : {false, true}) {
      const auto [got, want] = on_both([&](const Side& on) {
        Tensor db = on.parameter(Numbers(channels, add ? 0.5 : nan_value));
        on.b.sum_rows(on.picture(dy), db, add);
        return Results{db};
      });
      expect_near(got[0], want[0], 1e-6, "sum rows " + std::to_string(rows) + "×" + std::to_string(channels),
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
        Numbers x = random(outer * middle * inner, 1, -1);
        if (x.size() > 40) x[x.size() / 2] = nan_value;
        const Numbers before = add ? random(outer * inner, 2) : Numbers(outer * inner, nan_value);
        const auto [got, want] = on_both([&, outer = outer, middle = middle, inner = inner](const Side& on) {
          Tensor y = on.picture(before);
          on.b.reduce(op, outer, middle, inner, on.picture(x), y, add);
          return Results{y};
        });
        std::ostringstream what;
        what << (op == Reduction::sum ? "sum " : "max ") << outer << "×" << middle << "×" << inner;
        expect_near(got[0], want[0], tolerance(), what.str());
      }
}

TEST_P(CpuKernels, SquaredNorm) {
  for (std::int64_t n : {1, 7, 63, 64, 1000, 40001})
    for (bool add : {false, true}) {
      Numbers x = random(n, 1);
      auto squares = [&](const Side& on) {
        Tensor y = on.parameter({add ? 2.0 : nan_value});
        on.b.squared_norm(on.picture(x), y, add);
        return Results{y};
      };
      const auto [got, want] = on_both(squares);
      expect_near(got[0], want[0], 1e-6, "sum of squares");
      x[n / 2] = infinity;
      EXPECT_EQ(squares(mine())[0].item(), infinity);
      x[n / 2] = nan_value;
      EXPECT_TRUE(std::isnan(squares(mine())[0].item()));
    }
}

const std::int64_t class_counts[] = {1, 2, 10, 16, 100, 1000};

TEST_P(CpuKernels, LogSoftmax) {
  for (std::int64_t classes : class_counts)
    for (std::int64_t rows : {1, 7, 130}) {
      const std::int64_t n = rows * classes;
      Numbers x = random(n, 1, 50, 10);
      if (n > 20) x[n - 1] = -infinity;
      const Numbers dy = random(n, 2);
      const auto [got, want] = on_both([&, rows = rows, classes = classes](const Side& on) {
        const Variable tx(on.picture(x).reshape({rows, classes}), true), y = log_softmax(tx);
        sum(mul(reshape(y, Shape{n}), on.picture(dy))).backward();
        return Results{y.value(), tx.grad()};
      });
      expect_near(got[0], want[0], tolerance(), "log softmax");
      expect_near(got[1], want[1], tolerance(), "log softmax backward", std::sqrt(double(classes)));
    }
}

TEST_P(CpuKernels, CrossEntropy) {
  for (std::int64_t classes : class_counts)
    for (std::int64_t rows : {1, 7, 130})
      for (double smoothing : {0.0, 0.1}) {
        const std::int64_t n = rows * classes;
        Numbers x = random(n, 1, 0, 3), labels;
        for (double& v : x) v = std::round(v);  // ties: only the first largest counts as the answer
        if (classes > 1) x[n - 1] = smoothing == 0 ? -infinity : -90;
        for (std::int64_t r = 0; r < rows; r++) {
          const double* row = x.data() + r * classes;
          labels.push_back(r % 3 == 0   ? double(std::max_element(row, row + classes) - row)
                           : r % 3 == 1 ? double((r * 7) % std::max<std::int64_t>(1, classes - 1))
                                        : 0);
        }
        const Numbers old = random(n, 3);
        const auto [got, want] = on_both([&, rows = rows, classes = classes](const Side& on) {
          const Shape shape{rows, classes};
          const Tensor tx = on.picture(x).reshape(shape), tl = Tensor::of(on.b, {rows}, labels, DType::i32);
          Tensor p(on.b, shape, on.parameters), loss(on.b, {1}, on.parameters),
              uncounted = Tensor::like(loss), correct = Tensor::of(on.b, {1}, {5}, DType::i32),
              dx = on.picture(Numbers(n, nan_value)).reshape(shape), added = on.picture(old).reshape(shape);
          on.b.cross_entropy(tx, tl, smoothing, loss, p, &correct);
          on.b.cross_entropy(tx, tl, smoothing, uncounted, p, nullptr);
          EXPECT_TRUE(bytes_of(uncounted) == bytes_of(loss));
          on.b.cross_entropy_backward(p, tl, smoothing, on.parameter({0.5}), dx, false);
          on.b.cross_entropy_backward(p, tl, smoothing, on.parameter({0.5}), added, true);
          return Results{loss, p, correct, dx, added};
        });
        expect_near(got[0], want[0], 1e-5, "loss");
        expect_near(got[1], want[1], 1e-5, "probabilities", 0.01);
        EXPECT_EQ(got[2].item(), want[2].item());
        expect_near(got[3], want[3], type == DType::bf16 ? 1.0 / 200 : 1e-5, "cross-entropy backward", 0.5 / rows);
        expect_near(got[4], want[4], tolerance(), "cross-entropy backward, added");
      }
  Tensor x = mine().picture(Numbers(20, 0.0)).reshape({2, 10}), p(*backend, {2, 10}), loss(*backend, {1});
  for (const Numbers& labels : {Numbers{3, 10}, Numbers{-1, 3}})
    EXPECT_THROW(backend->cross_entropy(x, Tensor::of(*backend, {2}, labels, DType::i32), 0, loss, p, nullptr), Error);
}

INSTANTIATE_TEST_SUITE_P(All, CpuKernels,
                         testing::Combine(testing::Values(DType::f32, DType::bf16), testing::Values(1, 2)),
                         [](const auto& info) {
                           return std::string(name_of(std::get<0>(info.param))) + "_" +
                                  std::to_string(std::get<1>(info.param));
                         });

// ---- the backend ----------------------------------------------------------------------------------------------------
TEST(CpuBackend, DescribesItself) {
  auto backend = cpu_backend(2);
  EXPECT_EQ(backend->threads(), 2);
  EXPECT_TRUE(backend->supports(DType::f32));
  EXPECT_FALSE(backend->supports(DType::i32));
  EXPECT_TRUE(holds(backend->description(), {"2 threads"}));
  EXPECT_GE(cpu_backend()->threads(), 1);
}

TEST(CpuBackend, RefusesDoubles) {
  auto backend = cpu_backend(1);
  if (backend->name() == "reference") GTEST_SKIP() << "built without oneDNN";
  EXPECT_FALSE(backend->supports(DType::f64));
  Tensor x(*backend, {4}, DType::f64), y(*backend, {1}, DType::f64);
  EXPECT_REFUSED(backend->reduce(Reduction::sum, 1, 4, 1, x, y, false), "only the reference backend has f64");
}

TEST(CpuBackend, MatrixProducts) {
  auto backend = cpu_backend(2), reference = reference_backend(2);
  for (int variant = 0; variant < 8; variant++) {
    const bool ta = variant & 1, tb = variant & 2, add = variant & 4;
    const std::int64_t batch = 2, m = 5, n = 7, k = 3;
    auto product = [&](const Side& on) {
      const Tensor x = on.parameter(random_values(batch * m * k, 1)).reshape({batch, ta ? k : m, ta ? m : k}),
                   w = on.parameter(random_values(batch * k * n, 2)).reshape({batch, tb ? n : k, tb ? k : n});
      Tensor c = Tensor::full(on.b, {batch, m, n}, add ? 1 : nan_value, on.parameters);
      on.b.gemm(ta, tb, x, w, c, add);
      return c;
    };
    expect_near(product({*backend, DType::f32, DType::f32}), product({*reference, DType::f64, DType::f64}), 1e-5,
                "gemm");
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

}  // namespace
}  // namespace tandem::test
