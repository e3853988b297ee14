// What the op table does not show of the reference backend, the oracle of the others: edges by hand, NaN, sums kept in
// double, counters, threads. Its values and gradients are checked there, against PyTorch and finite differences; its
// convolutions in test_convolution.cpp against plain loops.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "core/backend.h"
#include "tests/support.h"

using namespace tandem;
using test::refused;

namespace {

constexpr double nan_value = std::numeric_limits<double>::quiet_NaN();

std::unique_ptr<Backend> backend_of(int threads = 2) { return reference_backend(threads); }

Tensor random(Backend& b, const Shape& shape, unsigned seed, DType type = DType::f64) {
  std::mt19937 generator(seed);
  std::uniform_real_distribution<double> uniform(-1, 1);
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

// ---- convolution ----------------------------------------------------------------------------------------------------
// Bit for bit the same, run after run, and no memory kept.
TEST(Reference, ConvolutionIsReproducible) {
  auto b = backend_of();
  const ConvShape s{.n = 8, .h = 12, .w = 12, .c_in = 8, .c_out = 24, .kh = 3, .kw = 3, .pad_h = 1, .pad_w = 1};
  Tensor x = random(*b, {s.n, s.h, s.w, s.c_in}, 1, DType::f32);
  Tensor dy = random(*b, {s.n, s.out_h(), s.out_w(), s.c_out}, 2, DType::f32);
  Tensor first(*b, {s.c_out, s.kh, s.kw, s.c_in}), again = Tensor::like(first);
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

TEST(Reference, AveragePoolCountsOnlyThePicture) {
  auto b = backend_of();
  const PoolShape s{
      .n = 1, .h = 2, .w = 2, .c = 1, .kh = 2, .kw = 2, .stride_h = 2, .stride_w = 2, .pad_h = 1, .pad_w = 1};
  Tensor x = Tensor::of(*b, {1, 2, 2, 1}, {1, 2, 3, 4}, DType::f64), y(*b, {1, 2, 2, 1}, DType::f64);
  b->average_pool(s, x, y);
  EXPECT_EQ(y.values(), (std::vector<double>{1, 2, 3, 4}));
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
    EXPECT_TRUE(refused([&] { b->cross_entropy(x, labels, 0, loss, p, nullptr); },
                        {"row 3 has the label " + std::to_string(bad)}));
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
