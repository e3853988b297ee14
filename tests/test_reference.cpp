// What the op table does not show of the reference backend, the oracle of the others: edges by hand, NaN, sums kept in
// double, counters, threads. Its values and gradients are checked there, against PyTorch and finite differences.
#include "tests/support.h"

namespace tandem::test {
namespace {

constexpr double nan_value = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();

using Reference = OnReference;

Tensor random(Backend& b, const Shape& shape, const std::string& name, DType type) {
  return Tensor::of(b, shape, numbers(name, shape.numel()), type);
}

// ---- the backend itself ---------------------------------------------------------------------------------------------

TEST_F(Reference, DescribesItself) {
  EXPECT_EQ(backend->name(), "reference");
  EXPECT_EQ(backend->description(),
            backend->threads() == 2 ? "reference loops, 2 threads" : "reference loops, 1 thread");  // no OpenMP
  EXPECT_EQ(reference_backend(1)->description(), "reference loops, 1 thread");
  for (DType t : {DType::f32, DType::bf16, DType::f64}) EXPECT_TRUE(backend->supports(t));
  for (DType t : {DType::f16, DType::u8, DType::i32}) EXPECT_FALSE(backend->supports(t));
  EXPECT_FALSE(backend->on_device());
  Tensor a(*backend, {2}, DType::i32), c(*backend, {1}, DType::i32);
  EXPECT_THROW(backend->squared_norm(a, c, false), Error);  // not a floating type
}

// ---- convolution ----------------------------------------------------------------------------------------------------
// Bit for bit the same, run after run, and no memory kept.
TEST_F(Reference, ConvolutionIsReproducible) {
  const ConvShape s{.n = 8, .h = 12, .w = 12, .c_in = 8, .c_out = 24, .kh = 3, .kw = 3, .pad_h = 1, .pad_w = 1};
  Tensor x = random(*backend, {s.n, s.h, s.w, s.c_in}, "x", DType::f32);
  Tensor dy = random(*backend, {s.n, s.out_h(), s.out_w(), s.c_out}, "dy", DType::f32);
  Tensor first(*backend, {s.c_out, s.kh, s.kw, s.c_in}), again = Tensor::like(first);
  const std::uint64_t blocks = backend->memory().statistics().live_blocks;
  backend->conv2d_backward_filter(s, x, dy, first, false);
  for (int i = 0; i < 3; i++) {
    backend->conv2d_backward_filter(s, x, dy, again, false);
    EXPECT_EQ(first.values(), again.values());
  }
  EXPECT_EQ(backend->memory().statistics().live_blocks, blocks);
}

// ---- pooling --------------------------------------------------------------------------------------------------------

TEST_F(Reference, MaxPoolByHand) {
  const PoolShape s{.n = 1, .h = 3, .w = 3, .c = 1, .kh = 2, .kw = 2, .stride_h = 1, .stride_w = 1};
  Tensor x = Tensor::of(*backend, {1, 3, 3, 1}, {-1, 5, 5, -2, 4, 5, -3, -4, -5}, DType::f64);
  Tensor y(*backend, {1, 2, 2, 1}, DType::f64), argmax(*backend, {1, 2, 2, 1}, DType::u8),
      dx = Tensor::full(*backend, x.shape(), nan_value, DType::f64);
  backend->max_pool(s, x, false, y, &argmax);
  EXPECT_EQ(y.values(), (Numbers{5, 5, 4, 5}));
  EXPECT_EQ(argmax.values(), (Numbers{1, 0, 1, 1}));  // the first of equals
  Tensor dy = Tensor::of(*backend, {1, 2, 2, 1}, {1, 10, 100, 1000}, DType::f64);
  backend->max_pool_backward(s, dy, argmax, dx, false);
  EXPECT_EQ(dx.values(), (Numbers{0, 11, 0, 0, 100, 1000, 0, 0, 0}));  // overlapping windows add

  Tensor negative = Tensor::full(*backend, x.shape(), -1, DType::f64);
  backend->max_pool(s, negative, true, y, &argmax);
  EXPECT_EQ(y.values(), (Numbers(4, 0)));
  EXPECT_EQ(argmax.values(), (Numbers(4, 255)));
  backend->max_pool_backward(s, dy, argmax, dx, false);
  EXPECT_EQ(dx.values(), (Numbers(9, 0)));
  backend->max_pool(s, Tensor::full(*backend, x.shape(), 0, DType::f64), true, y,
                    &argmax);  // zero is cut: relu has no gradient there
  EXPECT_EQ(argmax.values(), (Numbers(4, 255)));
}

TEST_F(Reference, MaxPoolKeepsNaN) {
  const PoolShape s{.n = 1, .h = 2, .w = 6, .c = 1};
  // A NaN first, last, and after a larger number; with and without relu.
  Tensor x =
      Tensor::of(*backend, {1, 2, 6, 1}, {nan_value, 1, -1, -2, 9, 1, 2, 3, -3, nan_value, nan_value, 8}, DType::f64);
  for (DType type : {DType::f64, DType::f32, DType::bf16})
    for (bool relu : {false, true}) {
      Tensor y(*backend, {1, 1, 3, 1}, type), argmax(*backend, {1, 1, 3, 1}, DType::u8);
      backend->max_pool(s, x.cast(type), relu, y, &argmax);
      for (double v : y.values()) EXPECT_TRUE(std::isnan(v));
      EXPECT_EQ(argmax.values(), (Numbers{0, 3, 2}));
    }
}

TEST_F(Reference, AveragePoolCountsOnlyThePicture) {
  const PoolShape s{
      .n = 1, .h = 2, .w = 2, .c = 1, .kh = 2, .kw = 2, .stride_h = 2, .stride_w = 2, .pad_h = 1, .pad_w = 1};
  Tensor x = Tensor::of(*backend, {1, 2, 2, 1}, {1, 2, 3, 4}, DType::f64), y(*backend, {1, 2, 2, 1}, DType::f64);
  backend->average_pool(s, x, y);
  EXPECT_EQ(y.values(), (Numbers{1, 2, 3, 4}));
}

// ---- rows and reductions --------------------------------------------------------------------------------------------

TEST_F(Reference, Reduce) {
  Tensor x = Tensor::of(*backend, {2, 3, 2}, {1, 2, 3, nan_value, 5, 6, -7, -8, -9, -10, -11, -12}, DType::f64),
         y = Tensor::full(*backend, {2, 2}, nan_value, DType::f64);
  for (const auto& [op, want] : {std::pair{Reduction::sum, Numbers{9, nan_value, -27, -30}},
                                 {Reduction::max, {5, nan_value, -7, -8}}}) {  // NaN, although 6 comes later
    backend->reduce(op, 2, 3, 2, x, y, false);
    const Numbers v = y.values();
    for (std::size_t i = 0; i < 4; i++) EXPECT_TRUE(v[i] == want[i] || (std::isnan(v[i]) && i == 1)) << i;
  }
  Tensor one = Tensor::full(*backend, {1}, 100, DType::f64);
  backend->reduce(Reduction::sum, 1, 2, 1, Tensor::of(*backend, {2}, {1, 2}, DType::f64), one, true);
  EXPECT_EQ(one.item(), 103);

  // Sums are kept in double: 2²⁴ + 1 + … + 1 would stand still in float.
  Tensor ones = Tensor::full(*backend, {1001}, 1), total(*backend, {1});
  ones.write<float>()[0] = 16777216;
  backend->reduce(Reduction::sum, 1, 1001, 1, ones, total, false);
  EXPECT_EQ(total.item(), 16778216);
  backend->sum_rows(ones.reshape({1001, 1}), total, false);
  EXPECT_EQ(total.item(), 16778216);
}

TEST_F(Reference, SquaredNorm) {
  for (DType type : {DType::f64, DType::f32, DType::bf16}) {
    Tensor x = random(*backend, {70001}, "x", type);  // enough for two threads
    Tensor y = Tensor::full(*backend, {1}, nan_value, type == DType::f64 ? DType::f64 : DType::f32);
    double want = 0;
    for (double v : x.values()) want += v * v;
    backend->squared_norm(x, y, false);
    EXPECT_NEAR(y.item(), want, 1e-7 * want);
    backend->squared_norm(x, y, true);
    EXPECT_NEAR(y.item(), 2 * want, 2e-7 * want);
    backend->squared_norm(Tensor::of(*backend, {3}, {1, -inf, inf}, type), y, false);
    EXPECT_EQ(y.item(), inf);
    backend->squared_norm(Tensor::of(*backend, {3}, {inf, nan_value, 1}, type), y, false);
    EXPECT_TRUE(std::isnan(y.item()));
  }
  Tensor y(*backend, {1});
  backend->squared_norm(Tensor::of(*backend, {2}, {1e30, 1}), y, false);
  EXPECT_EQ(y.item(), inf);
}

TEST_F(Reference, CrossEntropyCountsAndRefuses) {
  // Right; wrong; a tie, which the first class wins; NaN, never right; −∞ elsewhere, which must not make the loss NaN.
  Tensor x = Tensor::of(*backend, {6, 2}, {1, 2, 1, 2, 3, 3, 3, 3, 1, nan_value, 1, -inf});
  Tensor labels = Tensor::of(*backend, {6}, {1, 0, 0, 1, 0, 0}, DType::i32), loss(*backend, {1}), p(*backend, {6, 2});
  Tensor correct = Tensor::full(*backend, {1}, 40, DType::i32);
  backend->cross_entropy(x, labels, 0, loss, p, &correct);
  EXPECT_EQ(correct.item(), 43);
  EXPECT_TRUE(std::isnan(loss.item()));
  Tensor last = p.slice(5, 6);
  backend->cross_entropy(x.slice(5, 6), labels.slice(5, 6), 0, loss, last, nullptr);
  EXPECT_EQ(loss.item(), 0);

  for (int bad : {-1, 2}) {
    labels.write<std::int32_t>()[3] = bad;
    EXPECT_REFUSED(backend->cross_entropy(x, labels, 0, loss, p, nullptr),
                   "row 3 has the label " + std::to_string(bad));
  }
}

// Loops over enough elements for two threads give what one thread gives.
TEST_F(Reference, ThreadsAgree) {
  auto one = reference_backend(1), two = reference_backend(2);
  Numbers results[2];
  for (int i = 0; i < 2; i++) {
    Backend& b = i ? *two : *one;
    const PoolShape s{
        .n = 3, .h = 32, .w = 32, .c = 16, .kh = 3, .kw = 3, .stride_h = 2, .stride_w = 2, .pad_h = 1, .pad_w = 1};
    Tensor x = random(b, {3, 32, 32, 16}, "x", DType::f32), y(b, {3, 16, 16, 16}), argmax(b, y.shape(), DType::u8);
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

}  // namespace
}  // namespace tandem::test
