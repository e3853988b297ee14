// The kernels of cuda/, run on the host thread by thread (emulated_cuda.h), against the reference backend: the index
// arithmetic, what is read and written, and that no result depends on which thread was first. On a GPU the op table
// runs them.
#include "core/strided_view.h"
#include "layers/optim/squared_norms.h"
#include "tests/support.h"
// The emulator renames a namespace and the words of CUDA's language, so the kernels come behind it, and nothing behind
// them.
#include "tests/emulated_cuda.h"

#include "cuda/elements.h"
#include "cuda/norm.h"
#include "cuda/plain_convolution.h"
#include "cuda/pool.h"
#include "cuda/rows.h"

namespace tandem::test {
namespace {
using emulated::Buffer;
using emulated::Grid;
using emulated::Order;

const Grid grid{nullptr, 5};

// Two types of pictures; each kernel also where 16 bytes at a time are not allowed (shift: elements off alignment).
template <class T>
struct CudaKernels : testing::Test {
  std::unique_ptr<Backend> reference = reference_backend();
  static constexpr bool half = std::is_same_v<T, f16>;
  static constexpr double tolerance = sizeof(T) == 4 ? 3e-6 : half ? 0x1p-10 : 0x1p-7;
  static constexpr DType oracle = half ? DType::f32 : dtype_of<T>;  // the reference backend has no f16
  static Numbers rounded(Numbers v) {
    for (double& x : v) x = double(Accumulator<T>(T(float(x))));
    return v;
  }
  Numbers pictures(const std::string& name, std::int64_t n, double low = -1, double high = 1) {
    return rounded(numbers(name, n, low, high));
  }
  Tensor tensor(const Numbers& v, const Shape& s) { return Tensor::of(*reference, s, v, oracle); }
  Tensor wide(const Numbers& v) { return Tensor::of(*reference, {std::int64_t(v.size())}, v); }
  Tensor whole(const std::vector<std::int32_t>& v) {
    return Tensor::of(*reference, {std::int64_t(v.size())}, Numbers(v.begin(), v.end()), DType::i32);
  }
  Tensor room(const Shape& s, bool f32 = false) { return Tensor(*reference, s, f32 ? DType::f32 : oracle); }

  // Runs it three times, with the threads in three orders, and returns what it gave; the three must be equal bit for
  // bit.
  static std::vector<Numbers> in_any_order(const std::function<std::vector<Numbers>()>& run) {
    emulated::order = Order::forward;
    const std::vector<Numbers> first = run();
    for (Order o : {Order::backward, Order::random}) {
      emulated::order = o;
      const std::vector<Numbers> other = run();
      for (std::size_t i = 0; i < first.size(); i++)
        EXPECT_TRUE(first[i].size() == other[i].size() &&
                    std::equal(first[i].begin(), first[i].end(), other[i].begin(),
                               [](double a, double b) { return a == b || (a != a && b != b); }))
            << "result " << i << " depends on the order of the threads";
    }
    emulated::order = Order::forward;
    return first;
  }
};
using Types = testing::Types<float, bf16, f16>;
TYPED_TEST_SUITE(CudaKernels, Types);

std::size_t scratch_for(int sums, std::int64_t channels) {
  return emulated::column_scratch(sums, channels) + 2 * std::size_t(channels);
}

struct NormCase {
  std::int64_t rows, channels;
  std::size_t shift = 0;
};
const NormCase norm_cases[] = {{2, 1}, {37, 8}, {300, 3}, {150, 48}, {5, 264}, {65, 16, 1}};

TYPED_TEST(CudaKernels, BatchNorm) {
  for (const NormCase& c : norm_cases)
    for (bool residual : {false, true})
      for (bool relu : {false, true}) {
        SCOPED_TRACE(testing::Message() << c.rows << " × " << c.channels << " shift " << c.shift << " residual "
                                        << residual << " relu " << relu);
        const NormShape s{.rows = c.rows, .channels = c.channels, .relu = relu};
        const Shape shape{c.rows, c.channels};
        const std::int64_t n = c.rows * c.channels;
        const Numbers x = this->pictures("x", n, 3, 5), r = this->pictures("r", n);
        const Numbers gamma = numbers("gamma", c.channels, 0.5, 1.5), beta = numbers("beta", c.channels),
                      mean = numbers("mean", c.channels), variance = numbers("variance", c.channels, 0.5, 2);
        Tensor m = this->wide(mean), v = this->wide(variance), y = this->room(shape),
               saved = this->room({c.channels}, true), inverse = this->room({c.channels}, true),
               eval = this->room(shape);
        const Tensor tr = this->tensor(r, shape);
        this->reference->batch_norm_inference(s, this->tensor(x, shape), residual ? &tr : nullptr, this->wide(gamma),
                                              this->wide(beta), m, v, eval);
        this->reference->batch_norm(s, this->tensor(x, shape), residual ? &tr : nullptr, this->wide(gamma),
                                    this->wide(beta), m, v, y, saved, inverse);
        const auto got = this->in_any_order([&] {
          Buffer<TypeParam> bx(x, c.shift), br(r), by{std::size_t(n)}, be{std::size_t(n)};
          Buffer<float> bg(gamma), bb(beta), bm(mean), bv(variance), bs(gamma.size()), bi(gamma.size()),
              scratch(scratch_for(2, c.channels));
          emulated::batch_norm_inference(grid, s, bx.data(), residual ? br.data() : nullptr, bg.data(), bb.data(),
                                         bm.data(), bv.data(), be.data(), scratch.data());
          emulated::batch_norm(grid, s, bx.data(), residual ? br.data() : nullptr, bg.data(), bb.data(), bm.data(),
                               bv.data(), by.data(), bs.data(), bi.data(), scratch.data());
          return std::vector<Numbers>{by.values(), bm.values(), bv.values(), bs.values(), bi.values(), be.values()};
        });
        EXPECT_TRUE(close("y", got[0], y.values(), this->tolerance));
        EXPECT_TRUE(close("running mean", got[1], m.values(), 1e-6));
        EXPECT_TRUE(close("running variance", got[2], v.values(), 1e-5));
        EXPECT_TRUE(close("mean", got[3], saved.values(), 1e-6));
        EXPECT_TRUE(close("inverse standard deviation", got[4], inverse.values(), 1e-5));
        EXPECT_TRUE(close("y of evaluation", got[5], eval.values(), this->tolerance));
      }
}

// Where the gradient of the residual goes: nowhere, to a tensor of its own, in place of dy, or onto what is there.
enum class Residual { none, kept, in_place, added };

TYPED_TEST(CudaKernels, BatchNormBackward) {
  using T = TypeParam;
  for (const NormCase& c : norm_cases)
    for (Residual residual : {Residual::none, Residual::kept, Residual::in_place, Residual::added})
      for (bool relu : {false, true})
        for (bool add : {false, true}) {
          if (add && residual == Residual::in_place) continue;
          SCOPED_TRACE(testing::Message() << c.rows << " × " << c.channels << " shift " << c.shift << " residual "
                                          << int(residual) << " relu " << relu << " add " << add);
          const NormShape s{.rows = c.rows, .channels = c.channels, .relu = relu};
          const Shape shape{c.rows, c.channels};
          const std::int64_t n = c.rows * c.channels;
          const bool with = residual != Residual::none;
          const Numbers x = this->pictures("x", n, 3, 5), r = this->pictures("r", n), dy = this->pictures("dy", n),
                        old = this->pictures("old", n), gamma = numbers("gamma", c.channels, 0.5, 1.5),
                        beta = numbers("beta", c.channels);
          Tensor m = this->wide(gamma), v = this->wide(gamma), y = this->room(shape),
                 saved = this->room({c.channels}, true), inverse = this->room({c.channels}, true);
          const Tensor tr = this->tensor(r, shape), tx = this->tensor(x, shape);
          this->reference->batch_norm(s, tx, with ? &tr : nullptr, this->wide(gamma), this->wide(beta), m, v, y, saved,
                                      inverse);
          Tensor dx = this->tensor(old, shape), dr = this->tensor(old, shape), dgamma = this->wide(gamma),
                 dbeta = this->wide(beta);
          const bool mask = relu && with;
          Backend::NormGradients out{.dx = &dx, .dresidual = with ? &dr : nullptr, .dgamma = &dgamma, .dbeta = &dbeta};
          out.add_dx = out.add_dgamma = out.add_dbeta = add;
          out.add_dresidual = residual == Residual::added;
          this->reference->batch_norm_backward(s, tx, mask ? &y : nullptr, this->tensor(dy, shape), this->wide(gamma),
                                               this->wide(beta), saved, inverse, out);
          const auto got = this->in_any_order([&] {
            Buffer<T> bx(x, c.shift), by(y.values()), bd(dy), bdx(old), bdr(old);
            Buffer<float> bg(gamma), bb(beta), bs(saved.values()), bi(inverse.values()), dg(gamma), db(beta),
                scratch(scratch_for(2, c.channels));
            T* to = !with ? nullptr : residual == Residual::in_place ? bd.data() : bdr.data();
            emulated::batch_norm_backward(grid, s, bx.data(), mask ? by.data() : nullptr, bd.data(), bg.data(),
                                          bb.data(), bs.data(), bi.data(),
                                          emulated::NormOutputs<T>{bdx.data(), to, dg.data(), db.data(), add,
                                                                   residual == Residual::added, add, add},
                                          scratch.data());
            return std::vector<Numbers>{bdx.values(), (residual == Residual::in_place ? bd : bdr).values(), dg.values(),
                                        db.values()};
          });
          EXPECT_TRUE(close("dx", got[0], dx.values(), 2 * this->tolerance, 0.1));
          if (with) {
            EXPECT_TRUE(close("dresidual", got[1], dr.values(), this->tolerance));
          }
          EXPECT_TRUE(close("dgamma", got[2], dgamma.values(), 2e-5));
          EXPECT_TRUE(close("dbeta", got[3], dbeta.values(), 2e-5));
        }
}

TYPED_TEST(CudaKernels, Pooling) {
  const PoolShape shapes[] = {
      {.n = 2, .h = 6, .w = 7, .c = 3, .kh = 3, .kw = 3, .stride_h = 1, .stride_w = 1},
      {.n = 2, .h = 9, .w = 7, .c = 3, .stride_h = 3, .stride_w = 3},
      {.n = 1, .h = 7, .w = 6, .c = 5, .kh = 3, .kw = 3, .pad_h = 1, .pad_w = 1},
      {.n = 3, .h = 4, .w = 5, .c = 2, .kh = 4, .kw = 5, .stride_h = 4, .stride_w = 5},
      {.n = 2, .h = 7, .w = 5, .c = 16},  // whole packs of channels; a row and a column under no window
      {.n = 1, .h = 6, .w = 7, .c = 24, .kh = 3, .kw = 3, .pad_h = 1, .pad_w = 1},
  };
  for (const PoolShape& s : shapes)
    for (bool relu : {false, true})
      for (bool add : {false, true}) {
        SCOPED_TRACE(testing::Message() << s.h << " × " << s.w << " window " << s.kh << " relu " << relu << " add "
                                        << add);
        const Shape in{s.n, s.h, s.w, s.c}, out{s.n, s.out_h(), s.out_w(), s.c};
        const Numbers x = numbers("x", in.numel(), -1, 1, 0.25), dy = this->pictures("dy", out.numel()),
                      old = this->pictures("old", in.numel());  // ties are likely
        Tensor y = this->room(out), argmax(*this->reference, out, DType::u8), mean = this->room(out),
               dx = this->tensor(old, in), dmean = this->tensor(old, in);
        this->reference->max_pool(s, this->tensor(x, in), relu, y, &argmax);
        this->reference->max_pool_backward(s, this->tensor(dy, out), argmax, dx, add);
        this->reference->average_pool(s, this->tensor(x, in), mean);
        this->reference->average_pool_backward(s, this->tensor(dy, out), dmean, add);
        const auto got = this->in_any_order([&] {
          const std::size_t n = std::size_t(out.numel());
          Buffer<TypeParam> bx(x), by(n), bm(n), bd(dy), bdx(old), bdm(old);
          Buffer<std::uint8_t> bw(n);
          emulated::max_pool(grid, s, bx.data(), relu, by.data(), bw.data());
          emulated::max_pool_backward(grid, s, bd.data(), bw.data(), bdx.data(), add);
          emulated::average_pool(grid, s, bx.data(), bm.data());
          emulated::average_pool_backward(grid, s, bd.data(), bdm.data(), add);
          return std::vector<Numbers>{by.values(), bw.values(), bdx.values(), bm.values(), bdm.values()};
        });
        EXPECT_EQ(got[0], y.values());
        EXPECT_EQ(got[1], argmax.values());
        EXPECT_TRUE(close("dx", got[2], dx.values(), this->tolerance));
        EXPECT_TRUE(close("mean", got[3], mean.values(), this->tolerance));
        EXPECT_TRUE(close("dx of the mean", got[4], dmean.values(), this->tolerance));
      }
}

TYPED_TEST(CudaKernels, RowsOfAnotherWidthAndRowsThatAreAlike) {
  for (std::int64_t rows : {1, 1300})
    for (auto [from, to] : {std::pair<std::int64_t, std::int64_t>{3, 8}, {8, 3}, {8, 8}, {1, 8}}) {
      const Numbers x = this->pictures("x", rows * from), row = this->pictures("row", to);
      const auto got = this->in_any_order([&, from = from, to = to] {
        Buffer<TypeParam> bx(x), by(std::size_t(rows * to)), br(row), bz(std::size_t(rows * to));
        emulated::set_channels(grid, rows, from, to, bx.data(), by.data());
        emulated::fill_rows(grid, rows, to, br.data(), bz.data());
        return std::vector<Numbers>{by.values(), bz.values()};
      });
      for (std::int64_t i = 0; i < rows * to; i++) {
        ASSERT_EQ(got[0][i], i % to < from ? x[i / to * from + i % to] : 0) << from << " to " << to;
        ASSERT_EQ(got[1][i], row[i % to]);
      }
    }
}

TYPED_TEST(CudaKernels, Sums) {
  struct View {
    std::int64_t outer, middle, inner;
  };
  for (const View& v :
       {View{1, 1, 1}, View{3, 5, 7}, View{4, 70, 1}, View{2, 300, 1}, View{1, 130, 40}, View{1, 2049, 8}})
    for (bool add : {false, true}) {
      SCOPED_TRACE(testing::Message() << v.outer << " × " << v.middle << " × " << v.inner << " add " << add);
      const std::int64_t n = v.outer * v.middle * v.inner, results = v.outer * v.inner;
      const Numbers x = this->pictures("x", n), old = this->pictures("old", results);
      const Tensor tx = this->tensor(x, {v.outer * v.middle, v.inner});
      Tensor sum = this->tensor(old, {results}), largest = this->room({results}),
             columns = this->wide(numbers("db", v.inner)), squares = this->wide({0.5});
      this->reference->reduce(Reduction::sum, v.outer, v.middle, v.inner, tx, sum, add);
      this->reference->reduce(Reduction::max, v.outer, v.middle, v.inner, tx, largest, false);
      this->reference->sum_rows(tx, columns, add);
      this->reference->squared_norm(tx, squares, add);
      const auto got = this->in_any_order([&] {
        Buffer<TypeParam> bx(x), bs(old), bl{std::size_t(results)};
        Buffer<float> bc(numbers("db", v.inner)), bq(Numbers{0.5}), scratch(scratch_for(1, v.inner)),
            parts{std::size_t(emulated::most_parts)};
        emulated::reduce(grid, Reduction::sum, v.outer, v.middle, v.inner, bx.data(), bs.data(), add);
        emulated::reduce(grid, Reduction::max, v.outer, v.middle, v.inner, bx.data(), bl.data(), false);
        emulated::sum_rows(grid, v.outer * v.middle, v.inner, bx.data(), bc.data(), add, scratch.data());
        emulated::squared_norm(grid, n, bx.data(), bq.data(), add, parts.data());
        return std::vector<Numbers>{bs.values(), bl.values(), bc.values(), bq.values()};
      });
      EXPECT_TRUE(close("sum", got[0], sum.values(), this->tolerance));
      EXPECT_EQ(got[1], largest.values());
      EXPECT_TRUE(close("sum_rows", got[2], columns.values(), 3e-6, 1));
      EXPECT_TRUE(close("squared_norm", got[3], squares.values(), 3e-6));
    }
}

TYPED_TEST(CudaKernels, ANanWinsAMaximumAndPassesReLU) {
  for (std::int64_t middle : {5, 300}) {
    Numbers x = this->pictures("x", middle);
    x[3] = NAN;
    Buffer<TypeParam> bx(x), by(1), bp(1);
    Buffer<std::uint8_t> argmax(1);
    emulated::reduce(grid, Reduction::max, 1, middle, 1, bx.data(), by.data(), false);
    EXPECT_TRUE(std::isnan(by.values()[0]));
    emulated::max_pool(grid, {.n = 1, .h = 1, .w = middle, .c = 1, .kh = 1, .kw = middle}, bx.data(), true, bp.data(),
                       argmax.data());
    EXPECT_TRUE(std::isnan(bp.values()[0]));
  }
}

TYPED_TEST(CudaKernels, CrossEntropy) {
  for (auto [rows, classes] : {std::pair<std::int64_t, std::int64_t>{1, 3}, {9, 10}, {270, 33}})
    for (double smoothing : {0.0, 0.2})
      for (bool add : {false, true}) {
        SCOPED_TRACE(testing::Message() << rows << " × " << classes << " smoothing " << smoothing << " add " << add);
        const Shape shape{rows, classes};
        const std::int64_t n = rows * classes;
        const Numbers x = this->rounded(numbers("x", n, -9, 9, 0.5)), old = this->pictures("old", n);
        const std::vector<double> drawn = numbers("labels", rows, 0, double(classes) - 1, 1);
        const std::vector<std::int32_t> labels(drawn.begin(), drawn.end());
        Tensor loss(*this->reference, Shape{}), p = this->room(shape, true), correct = this->whole({7}),
                                                de = this->tensor(old, shape);
        const Tensor seed = Tensor::full(*this->reference, Shape{}, 2);
        this->reference->cross_entropy(this->tensor(x, shape), this->whole(labels), smoothing, loss, p, &correct);
        this->reference->cross_entropy_backward(p, this->whole(labels), smoothing, seed, de, add);
        const auto got = this->in_any_order([&] {
          Buffer<TypeParam> bx(x), bde(old);
          Buffer<std::int32_t> bl(drawn), bc(Numbers{7});
          Buffer<float> bloss(1), bp{std::size_t(n)}, scratch(2 * std::size_t(rows)), bseed(Numbers{2}),
              pgiven(p.values());
          emulated::cross_entropy(grid, rows, classes, bx.data(), bl.data(), smoothing, bloss.data(), bp.data(),
                                  bc.data(), scratch.data());
          emulated::cross_entropy_backward(grid, rows, classes, pgiven.data(), bl.data(), smoothing, bseed.data(),
                                           bde.data(), add);
          return std::vector<Numbers>{bloss.values(), bp.values(), bc.values(), bde.values()};
        });
        EXPECT_TRUE(close("loss", got[0], loss.values(), 2e-6));
        EXPECT_TRUE(close("probabilities", got[1], p.values(), 2e-6));
        EXPECT_EQ(got[2], correct.values());
        EXPECT_TRUE(close("gradient", got[3], de.values(), this->tolerance));
      }
}

// What launch_rows() runs on a device: the 32 lanes of a warp share a row.
template <class T>
struct SumMaxAndCopy {
  std::int64_t n;
  const T* x;
  float *sums, *largest;
  T* y;
  template <class Lanes>
  void operator()(std::int64_t row, const Lanes& lanes) const {
    sums[row] = lanes.sum(n, [=, this](std::int64_t c) { return float(x[row * n + c]); });
    largest[row] = lanes.max(n, [=, this](std::int64_t c) { return float(x[row * n + c]); });
    lanes.each(n, [=, this](std::int64_t c) { y[row * n + c] = x[row * n + c]; });
  }
};
TYPED_TEST(CudaKernels, AWarpSharesARow) {
  for (auto [rows, n] : {std::pair<std::int64_t, std::int64_t>{1, 3}, {9, 32}, {70, 101}}) {
    const Numbers x = this->rounded(numbers("x", rows * n, -9, 9, 0.5));
    Numbers sums(std::size_t(rows), 0), largest(std::size_t(rows), -9);
    for (std::size_t i = 0; i < x.size(); i++) {
      sums[i / std::size_t(n)] += x[i];
      largest[i / std::size_t(n)] = std::max(largest[i / std::size_t(n)], x[i]);
    }
    const auto got = this->in_any_order([&] {
      Buffer<TypeParam> bx(x), by(x.size());
      Buffer<float> bs{std::size_t(rows)}, bl{std::size_t(rows)};
      device_launch_rows(nullptr, rows, SumMaxAndCopy<TypeParam>{n, bx.data(), bs.data(), bl.data(), by.data()});
      return std::vector<Numbers>{bs.values(), bl.values(), by.values()};
    });
    EXPECT_TRUE(close("sums", got[0], sums, 1e-6));
    EXPECT_EQ(got[1], largest);
    EXPECT_EQ(got[2], x);
  }
}

TYPED_TEST(CudaKernels, ALabelThatIsNoClassGivesNan) {
  for (double label : {-1.0, 3.0}) {
    Buffer<TypeParam> x(Numbers{1, 2, 3});
    Buffer<std::int32_t> labels(Numbers{label}), correct(Numbers{0});
    Buffer<float> loss(1), p(3), scratch(2);
    emulated::cross_entropy(grid, 1, 3, x.data(), labels.data(), 0, loss.data(), p.data(), correct.data(),
                            scratch.data());
    EXPECT_TRUE(std::isnan(loss.values()[0]));
    EXPECT_EQ(correct.values()[0], 0);
  }
}

TYPED_TEST(CudaKernels, BiasReluAndConversion) {
  using T = TypeParam;
  for (auto [rows, channels, shift] :
       {std::tuple<std::int64_t, std::int64_t, std::size_t>{5, 16, 0}, {5, 16, 1}, {7, 3, 0}})
    for (bool relu : {false, true}) {
      const Numbers y = this->pictures("y", rows * channels), bias = numbers("bias", channels);
      Numbers want = y, sum = y;
      for (std::size_t i = 0; i < y.size(); i++) {
        want[i] += bias[i % bias.size()];
        if (relu) want[i] = std::max(0.0, want[i]);
        sum[i] += double(float(y[i]));
      }
      const auto got = this->in_any_order([&] {
        Buffer<T> by(y, shift);
        Buffer<float> bb(bias, shift), add(y);
        emulated::bias_relu(grid, rows, channels, bb.data(), relu, by.data());
        Buffer<T> from(y);
        emulated::convert(grid, std::int64_t(y.size()), static_cast<const T*>(from.data()), add.data(), true);
        return std::vector<Numbers>{by.values(), add.values()};
      });
      EXPECT_TRUE(close("y", got[0], want, this->tolerance));
      EXPECT_TRUE(close("sum", got[1], sum, 1e-6));
    }
}

TYPED_TEST(CudaKernels, PlainConvolution) {
  using T = TypeParam;
  ConvShape dilated{.n = 2, .h = 7, .w = 7, .c_in = 2, .c_out = 2, .kh = 2, .kw = 3, .pad_h = 2, .pad_w = 1};
  dilated.dilation_h = dilated.dilation_w = 2;
  const ConvShape shapes[] = {
      {.n = 2, .h = 5, .w = 4, .c_in = 3, .c_out = 4, .kh = 3, .kw = 3, .pad_h = 1, .pad_w = 1},
      {.n = 1, .h = 7, .w = 6, .c_in = 4, .c_out = 6, .kh = 3, .kw = 2, .stride_h = 2, .stride_w = 3, .groups = 2},
      dilated,
      {.n = 1, .h = 4, .w = 4, .c_in = 8, .c_out = 8, .kh = 3, .kw = 3, .pad_h = 1, .pad_w = 1, .groups = 8},
  };
  for (const ConvShape& s : shapes)
    for (bool add : {false, true}) {
      const Shape in{s.n, s.h, s.w, s.c_in}, out{s.n, s.out_h(), s.out_w(), s.c_out},
          filter{s.c_out, s.kh, s.kw, s.c_in / s.groups};
      const Numbers x = this->pictures("x", in.numel()), w = this->pictures("w", filter.numel()),
                    dy = this->pictures("dy", out.numel()), old = this->pictures("old", in.numel());
      Tensor y = this->room(out), dx = this->tensor(old, in), dw = Tensor::of(*this->reference, filter, w);
      const Tensor tw = Tensor::of(*this->reference, filter, w);
      this->reference->exact_convolution(true);
      this->reference->conv2d(s, this->tensor(x, in), tw, nullptr, false, y);
      this->reference->conv2d_backward_data(s, this->tensor(dy, out), tw, dx, add);
      this->reference->conv2d_backward_filter(s, this->tensor(x, in), this->tensor(dy, out), dw, add);
      const auto got = this->in_any_order([&] {
        Buffer<T> bx(x), bw(w), by{std::size_t(out.numel())}, bd(dy), bdx(old);
        Buffer<float> bdw(w);
        const T* cw = bw.data();
        emulated::plain_convolution(grid, s, static_cast<const T*>(bx.data()), cw, by.data());
        emulated::plain_convolution_backward_data(grid, s, static_cast<const T*>(bd.data()), cw, bdx.data(), add);
        emulated::plain_convolution_backward_filter(grid, s, static_cast<const T*>(bx.data()),
                                                    static_cast<const T*>(bd.data()), bdw.data(), add);
        return std::vector<Numbers>{by.values(), bdx.values(), bdw.values()};
      });
      EXPECT_TRUE(close("y", got[0], y.values(), this->tolerance));
      EXPECT_TRUE(close("dx", got[1], dx.values(), this->tolerance));
      EXPECT_TRUE(close("dw", got[2], dw.values(), 3e-6));
    }
}

// ---- what *.kernel.cpp files launch ---------------------------------------------------------------------------------
template <class F>
void in_three_orders(const F& f) {
  for (Order o : {Order::forward, Order::backward, Order::random}) emulated::order = o, f();
  emulated::order = Order::forward;
}

TEST(CudaLaunch, SumsOfBlocksAndSegmentsByNeighbouringThreads) {
  constexpr std::int64_t blocks = 83, first = 2;
  const Numbers w = numbers("w", 64 * (first + blocks)), g = numbers("g", 64 * (first + blocks), -3, 3);
  Numbers first_bits;
  in_three_orders([&] {
    Buffer<float> bw(w), bg(g), parts(Numbers(2 * (first + blocks), 0.0)), sums(Numbers{9, 0, 0, 1, 2, 0, 0});
    device_launch_sums<16>(nullptr, blocks, SquaredNormsOfBlocks<float>{first, bw.data(), bg.data(), parts.data()});
    const Numbers got = parts.values();
    Numbers squares(2 * (first + blocks), 0.0);
    for (std::int64_t b = first; b < first + blocks; b++)
      for (std::int64_t i = 64 * b; i < 64 * b + 64; i++)
        squares[2 * b] += w[i] * w[i], squares[2 * b + 1] += g[i] * g[i];
    EXPECT_TRUE(close("blocks", got, squares, 1e-6));
    // Segments: the first block alone, which is outside the range; one to the middle; one behind it; one without blocks
    // inside.
    Buffer<std::int32_t> bounds(Numbers{0, 2, 2, 40, 40, 85});
    device_launch_sums<256>(nullptr, 3,
                            SquaredNormsOfRanges<float>{first, 80, true, bounds.data(), parts.data(), sums.data()});
    auto sum = [&](std::int64_t begin, std::int64_t end, std::int64_t which) {
      double s = 0;
      for (std::int64_t b = begin; b < end; b++) s += got[2 * b + which];
      return s;
    };
    const Numbers segments = sums.values();
    EXPECT_TRUE(close("segments", segments,
                      {9, 0, 0, 1 + sum(2, 40, 0), 2 + sum(2, 40, 1), sum(40, 80, 0), sum(40, 80, 1)}, 1e-6));
    if (first_bits.empty()) first_bits = segments;
    EXPECT_EQ(segments, first_bits) << "the order of the threads shows";
  });
}

TYPED_TEST(CudaKernels, CopiesOfBoxes) {
  using T = TypeParam;
  constexpr int V = 16 / sizeof(T);
  struct Move {
    const char* name;
    Shape shape;
    StridedView from, to;
    bool packs;
  };
  const Move moves[] = {
      {"rows of 16 between others", {3, 4, 16}, {8, {96, 24, 1}}, {16, {160, 32, 1}}, true},
      {"begins off a pack", {3, 4, 16}, {1, {96, 24, 1}}, {16, {160, 32, 1}}, false},
      {"rows off a pack", {3, 4, 16}, {0, {100, 25, 1}}, {0, {64, 16, 1}}, false},
      {"a row that is no multiple", {5, 19}, {0, {40, 1}}, {8, {32, 1}}, false},
      {"every third", {4, 8}, {2, {24, 3}}, {0, {8, 1}}, false},
      {"transposed", {8, 6}, {0, {1, 8}}, {0, {6, 1}}, false},
      {"one axis", {24}, {8, {1}}, {0, {1}}, true},
  };
  const Numbers x = this->pictures("x", 600), old = this->pictures("old", 600);
  for (const Move& m : moves)
    for (bool add : {false, true}) {
      SCOPED_TRACE(testing::Message() << m.name << " add " << add);
      ViewCopy<T> view{.rank = m.shape.rank(), .from = m.from, .to = m.to};
      for (int k = 0; k < m.shape.rank(); k++) view.size[k] = m.shape[k];
      const std::int64_t n = m.shape.numel();
      auto copied = [&](auto f) {  // f runs it on the box
        Buffer<T> bx(x), by(old);
        view.x = bx.data(), view.y = by.data();
        EXPECT_EQ(in_packs(view, V), m.packs);
        f();
        return by.values();
      };
      const Numbers want = copied([&] {
        for (std::int64_t row = 0; row < n / view.size[view.rank - 1]; row++)
          add ? CopyRows<T, true>{view}(row) : CopyRows<T, false>{view}(row);
      });
      in_three_orders([&] {
        EXPECT_EQ(want, copied([&] {
                    add ? device_launch(nullptr, n, CopyPacks<T, true, 1>{view})
                        : device_launch(nullptr, n, CopyPacks<T, false, 1>{view});
                  }));
        if (!m.packs) return;
        EXPECT_EQ(want, copied([&] {
                    add ? device_launch(nullptr, n / V, CopyPacks<T, true, V>{view})
                        : device_launch(nullptr, n / V, CopyPacks<T, false, V>{view});
                  }));
      });
    }
}

// The emulator itself must be able to fail: a missing barrier, and one that not everybody reaches.
void races(int* out) {
  __shared__ int shared[64];
  shared[threadIdx.x] = int(threadIdx.x);
  out[threadIdx.x] = shared[63 - threadIdx.x];
}
void diverges(int*) {
  if (threadIdx.x % 2) __syncthreads();
  if (threadIdx.x < 40) __shfl_down_sync(~0u, 1, 1);
}
TEST(CudaEmulator, ShowsRacesAndBarriersThatAreNotReached) {
  std::vector<int> forward(64), backward(64);
  emulated::order = Order::forward;
  start(races, 1, 64, nullptr, forward.data());
  emulated::order = Order::backward;
  start(races, 1, 64, nullptr, backward.data());
  emulated::order = Order::forward;
  EXPECT_NE(forward, backward);
  for (int t = 0; t < 32; t++) {
    EXPECT_EQ(forward[t], -1) << "not written yet, whatever an earlier block has left";
    EXPECT_EQ(backward[63 - t], -1);
  }
  EXPECT_THROW(start(diverges, 1, 64, nullptr, forward.data()), std::logic_error);
}

}  // namespace
}  // namespace tandem::test
