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

// Three types of pictures; each kernel also where 16 bytes at a time are not allowed (shift: elements off alignment).
template <class T>
struct CudaKernels : testing::Test {};
using Types = testing::Types<float, bf16, f16>;
TYPED_TEST_SUITE(CudaKernels, Types);

template <class T>
constexpr double tolerance = sizeof(T) == 4           ? 3e-6
                             : std::is_same_v<T, f16> ? 0x1p-10
                                                      : 0x1p-7;

// ---- the reference backend, which has no f16 ------------------------------------------------------------------------
Backend& reference() {
  static const std::unique_ptr<Backend> backend = reference_backend();
  return *backend;
}
template <class T>
constexpr DType oracle = std::is_same_v<T, f16> ? DType::f32 : dtype_of<T>;
template <class T>
Numbers rounded(Numbers v) {
  for (double& x : v) x = double(Accumulator<T>(T(float(x))));
  return v;
}
template <class T>
Numbers pictures(const std::string& name, std::int64_t n, double low = -1, double high = 1) {
  return rounded<T>(numbers(name, n, low, high));
}
template <class T>
Tensor tensor(const Numbers& v, const Shape& s) {
  return Tensor::of(reference(), s, v, oracle<T>);
}
Tensor wide(const Numbers& v) { return tensor<float>(v, {std::int64_t(v.size())}); }
template <class T>
Tensor room(const Shape& s) {
  return Tensor(reference(), s, oracle<T>);
}

// ---- running kernels ------------------------------------------------------------------------------------------------
template <class F>
void in_three_orders(const F& f) {
  for (Order o : {Order::forward, Order::backward, Order::random}) emulated::order = o, f();
  emulated::order = Order::forward;
}
struct Result {
  const char* name;
  Numbers got, want;
  double tolerance, floor = 1e-6;
};
// Runs it with the threads in three orders: it gives what is wanted, and the same bits each time.
void in_any_order(const std::function<std::vector<Result>()>& run) {
  std::vector<Numbers> first;
  in_three_orders([&] {
    const std::vector<Result> all = run();
    first.resize(all.size());
    for (std::size_t i = 0; i < all.size(); i++) {
      const Result& r = all[i];
      EXPECT_TRUE(close(r.name, r.got, r.want, r.tolerance, r.floor));
      if (emulated::order == Order::forward) first[i] = r.got;
      EXPECT_TRUE(r.got == first[i]) << r.name << " depends on the order of the threads";
    }
  });
}

std::size_t scratch_for(int sums, std::int64_t channels) {
  return emulated::column_scratch(sums, channels) + 2 * std::size_t(channels);
}

struct NormCase {
  std::int64_t rows, channels;
  std::size_t shift = 0;
};
// Where the gradient of the residual goes: nowhere, to a tensor of its own, in place of dy, or onto what is there.
enum class Residual { none, kept, in_place, added };

TYPED_TEST(CudaKernels, BatchNorm) {
  using T = TypeParam;
  for (const NormCase& c : {NormCase{2, 1}, {37, 8}, {300, 3}, {150, 48}, {5, 264}, {65, 16, 1}})
    for (Residual residual : {Residual::none, Residual::kept, Residual::in_place, Residual::added})
      for (bool relu : {false, true}) {
        SCOPED_TRACE(testing::Message() << c.rows << " × " << c.channels << " shift " << c.shift << " residual "
                                        << int(residual) << " relu " << relu);
        const NormShape s{.rows = c.rows, .channels = c.channels, .relu = relu};
        const Shape shape{c.rows, c.channels};
        const std::int64_t n = shape.numel();
        const bool with = residual != Residual::none, in_place = residual == Residual::in_place;
        const Numbers x = pictures<T>("x", n, 3, 5), r = pictures<T>("r", n), dy = pictures<T>("dy", n),
                      old = pictures<T>("old", n), gamma = numbers("gamma", c.channels, 0.5, 1.5),
                      beta = numbers("beta", c.channels), mean = numbers("mean", c.channels),
                      variance = numbers("variance", c.channels, 0.5, 2);
        const Tensor tx = tensor<T>(x, shape), tr = tensor<T>(r, shape), tg = wide(gamma), tb = wide(beta);
        const Tensor* added = with ? &tr : nullptr;
        Tensor m = wide(mean), v = wide(variance), y = room<T>(shape), eval = room<T>(shape),
               saved = room<float>({c.channels}), inverse = room<float>({c.channels});
        reference().batch_norm_inference(s, tx, added, tg, tb, m, v, eval);
        reference().batch_norm(s, tx, added, tg, tb, m, v, y, saved, inverse);
        in_any_order([&] {
          Buffer<T> bx(x, c.shift), br(r), by{std::size_t(n)}, be{std::size_t(n)};
          Buffer<float> bg(gamma), bb(beta), bm(mean), bv(variance), bs(gamma.size()), bi(gamma.size()),
              scratch(scratch_for(2, c.channels));
          const T* to_add = with ? br.data() : nullptr;
          emulated::batch_norm_inference(grid, s, bx.data(), to_add, bg.data(), bb.data(), bm.data(), bv.data(),
                                         be.data(), scratch.data());
          emulated::batch_norm(grid, s, bx.data(), to_add, bg.data(), bb.data(), bm.data(), bv.data(), by.data(),
                               bs.data(), bi.data(), scratch.data());
          return std::vector<Result>{{"y", by.values(), y.values(), tolerance<T>},
                                     {"running mean", bm.values(), m.values(), 1e-6},
                                     {"running variance", bv.values(), v.values(), 1e-5},
                                     {"mean", bs.values(), saved.values(), 1e-6},
                                     {"inverse standard deviation", bi.values(), inverse.values(), 1e-5},
                                     {"y of evaluation", be.values(), eval.values(), tolerance<T>}};
        });
        for (bool add : {false, true}) {
          if (add && in_place) continue;
          SCOPED_TRACE(add ? "added" : "backward");
          Tensor dx = tensor<T>(old, shape), dr = tensor<T>(old, shape), dgamma = wide(gamma), dbeta = wide(beta);
          const bool mask = relu && with;
          Backend::NormGradients out{.dx = &dx, .dresidual = with ? &dr : nullptr, .dgamma = &dgamma, .dbeta = &dbeta};
          out.add_dx = out.add_dgamma = out.add_dbeta = add;
          out.add_dresidual = residual == Residual::added;
          reference().batch_norm_backward(s, tx, mask ? &y : nullptr, tensor<T>(dy, shape), tg, tb, saved, inverse,
                                          out);
          in_any_order([&] {
            Buffer<T> bx(x, c.shift), by(y.values()), bd(dy), bdx(old), bdr(old);
            Buffer<float> bg(gamma), bb(beta), bs(saved.values()), bi(inverse.values()), dg(gamma), db(beta),
                scratch(scratch_for(2, c.channels));
            T* to = !with ? nullptr : (in_place ? bd : bdr).data();
            emulated::batch_norm_backward(
                grid, s, bx.data(), mask ? by.data() : nullptr, bd.data(), bg.data(), bb.data(), bs.data(), bi.data(),
                emulated::NormOutputs<T>{bdx.data(), to, dg.data(), db.data(), add, out.add_dresidual, add, add},
                scratch.data());
            return std::vector<Result>{{"dx", bdx.values(), dx.values(), 2 * tolerance<T>, 0.1},
                                       {"dresidual", (in_place ? bd : bdr).values(), dr.values(), tolerance<T>},
                                       {"dgamma", dg.values(), dgamma.values(), 2e-5},
                                       {"dbeta", db.values(), dbeta.values(), 2e-5}};
          });
        }
      }
}

TYPED_TEST(CudaKernels, Pooling) {
  using T = TypeParam;
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
        const Numbers x = numbers("x", in.numel(), -1, 1, 0.25), dy = pictures<T>("dy", out.numel()),
                      old = pictures<T>("old", in.numel());  // ties are likely
        Tensor y = room<T>(out), argmax(reference(), out, DType::u8), mean = room<T>(out), dx = tensor<T>(old, in),
               dmean = tensor<T>(old, in);
        reference().max_pool(s, tensor<T>(x, in), relu, y, &argmax);
        reference().max_pool_backward(s, tensor<T>(dy, out), argmax, dx, add);
        reference().average_pool(s, tensor<T>(x, in), mean);
        reference().average_pool_backward(s, tensor<T>(dy, out), dmean, add);
        in_any_order([&] {
          const std::size_t n = std::size_t(out.numel());
          Buffer<T> bx(x), by(n), bm(n), bd(dy), bdx(old), bdm(old);
          Buffer<std::uint8_t> bw(n);
          emulated::max_pool(grid, s, bx.data(), relu, by.data(), bw.data());
          emulated::max_pool_backward(grid, s, bd.data(), bw.data(), bdx.data(), add);
          emulated::average_pool(grid, s, bx.data(), bm.data());
          emulated::average_pool_backward(grid, s, bd.data(), bdm.data(), add);
          return std::vector<Result>{{"y", by.values(), y.values(), 0},
                                     {"argmax", bw.values(), argmax.values(), 0},
                                     {"dx", bdx.values(), dx.values(), tolerance<T>},
                                     {"mean", bm.values(), mean.values(), tolerance<T>},
                                     {"dx of the mean", bdm.values(), dmean.values(), tolerance<T>}};
        });
      }
}

TYPED_TEST(CudaKernels, RowsOfAnotherWidthAndRowsThatAreAlike) {
  using T = TypeParam;
  for (std::int64_t rows : {1, 1300})
    for (auto [from, to] : {std::pair<std::int64_t, std::int64_t>{3, 8}, {8, 3}, {8, 8}, {1, 8}}) {
      SCOPED_TRACE(testing::Message() << from << " to " << to);
      const std::size_t n = std::size_t(rows * to);
      const Numbers x = pictures<T>("x", rows * from), row = pictures<T>("row", to);
      Numbers other(n), alike(n);
      for (std::int64_t i = 0; i < rows * to; i++) {
        other[i] = i % to < from ? x[i / to * from + i % to] : 0;
        alike[i] = row[i % to];
      }
      in_any_order([&, from = from, to = to] {
        Buffer<T> bx(x), by(n), br(row), bz(n);
        emulated::set_channels(grid, rows, from, to, bx.data(), by.data());
        emulated::fill_rows(grid, rows, to, br.data(), bz.data());
        return std::vector<Result>{{"other widths", by.values(), other, 0}, {"alike", bz.values(), alike, 0}};
      });
    }
}

TYPED_TEST(CudaKernels, Sums) {
  using T = TypeParam;
  struct View {
    std::int64_t outer, middle, inner;
  };
  for (const View& v : {View{1, 1, 1}, {3, 5, 7}, {4, 70, 1}, {2, 300, 1}, {1, 130, 40}, {1, 2049, 8}})
    for (bool add : {false, true}) {
      SCOPED_TRACE(testing::Message() << v.outer << " × " << v.middle << " × " << v.inner << " add " << add);
      const std::int64_t n = v.outer * v.middle * v.inner, results = v.outer * v.inner;
      const Numbers x = pictures<T>("x", n), old = pictures<T>("old", results), bias = numbers("db", v.inner);
      const Tensor tx = tensor<T>(x, {v.outer * v.middle, v.inner});
      Tensor sum = tensor<T>(old, {results}), largest = room<T>({results}), columns = wide(bias), squares = wide({0.5});
      reference().reduce(Reduction::sum, v.outer, v.middle, v.inner, tx, sum, add);
      reference().reduce(Reduction::max, v.outer, v.middle, v.inner, tx, largest, false);
      reference().sum_rows(tx, columns, add);
      reference().squared_norm(tx, squares, add);
      in_any_order([&] {
        Buffer<T> bx(x), bs(old), bl{std::size_t(results)};
        Buffer<float> bc(bias), bq(Numbers{0.5}), scratch(scratch_for(1, v.inner)),
            parts{std::size_t(emulated::most_parts)};
        emulated::reduce(grid, Reduction::sum, v.outer, v.middle, v.inner, bx.data(), bs.data(), add);
        emulated::reduce(grid, Reduction::max, v.outer, v.middle, v.inner, bx.data(), bl.data(), false);
        emulated::sum_rows(grid, v.outer * v.middle, v.inner, bx.data(), bc.data(), add, scratch.data());
        emulated::squared_norm(grid, n, bx.data(), bq.data(), add, parts.data());
        return std::vector<Result>{{"sum", bs.values(), sum.values(), tolerance<T>},
                                   {"largest", bl.values(), largest.values(), 0},
                                   {"sum_rows", bc.values(), columns.values(), 3e-6, 1},
                                   {"squared_norm", bq.values(), squares.values(), 3e-6}};
      });
    }
}

TYPED_TEST(CudaKernels, ANanWinsAMaximumAndPassesReLU) {
  for (std::int64_t middle : {5, 300}) {
    Numbers x = pictures<TypeParam>("x", middle);
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
  using T = TypeParam;
  for (auto [rows, classes] : {std::pair<std::int64_t, std::int64_t>{1, 3}, {9, 10}, {270, 33}})
    for (double smoothing : {0.0, 0.2})
      for (bool add : {false, true}) {
        SCOPED_TRACE(testing::Message() << rows << " × " << classes << " smoothing " << smoothing << " add " << add);
        const Shape shape{rows, classes};
        const Numbers x = rounded<T>(numbers("x", shape.numel(), -9, 9, 0.5)), old = pictures<T>("old", shape.numel());
        Numbers labels = numbers("labels", rows, 0, double(classes) - 1, 1);
        const Tensor seed = Tensor::full(reference(), Shape{}, 2),
                     tl = Tensor::of(reference(), {rows}, labels, DType::i32);
        Tensor loss(reference(), Shape{}), p = room<float>(shape), de = tensor<T>(old, shape),
                                           correct = Tensor::of(reference(), {1}, {7}, DType::i32);
        reference().cross_entropy(tensor<T>(x, shape), tl, smoothing, loss, p, &correct);
        reference().cross_entropy_backward(p, tl, smoothing, seed, de, add);
        in_any_order([&, rows = rows, classes = classes] {
          Buffer<T> bx(x), bde(old);
          Buffer<std::int32_t> bl(labels), bc(Numbers{7});
          Buffer<float> bloss(1), bp(x.size()), scratch(2 * std::size_t(rows)), bseed(Numbers{2}), pgiven(p.values());
          emulated::cross_entropy(grid, rows, classes, bx.data(), bl.data(), smoothing, bloss.data(), bp.data(),
                                  bc.data(), scratch.data());
          emulated::cross_entropy_backward(grid, rows, classes, pgiven.data(), bl.data(), smoothing, bseed.data(),
                                           bde.data(), add);
          return std::vector<Result>{{"loss", bloss.values(), loss.values(), 2e-6},
                                     {"probabilities", bp.values(), p.values(), 2e-6},
                                     {"correct", bc.values(), correct.values(), 0},
                                     {"gradient", bde.values(), de.values(), tolerance<T>}};
        });
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
  using T = TypeParam;
  for (auto [rows, n] : {std::pair<std::int64_t, std::int64_t>{1, 3}, {9, 32}, {70, 101}}) {
    const Numbers x = rounded<T>(numbers("x", rows * n, -9, 9, 0.5));
    Numbers sums(std::size_t(rows), 0), largest(std::size_t(rows), -9);
    for (std::size_t i = 0; i < x.size(); i++) {
      sums[i / std::size_t(n)] += x[i];
      largest[i / std::size_t(n)] = std::max(largest[i / std::size_t(n)], x[i]);
    }
    in_any_order([&, rows = rows, n = n] {
      Buffer<T> bx(x), by(x.size());
      Buffer<float> bs{std::size_t(rows)}, bl{std::size_t(rows)};
      device_launch_rows(nullptr, rows, SumMaxAndCopy<T>{n, bx.data(), bs.data(), bl.data(), by.data()});
      return std::vector<Result>{
          {"sums", bs.values(), sums, 1e-6}, {"largest", bl.values(), largest, 0}, {"copy", by.values(), x, 0}};
    });
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
      const Numbers y = pictures<T>("y", rows * channels), bias = numbers("bias", channels);
      Numbers want = y, sum = y;
      for (std::size_t i = 0; i < y.size(); i++) {
        want[i] += bias[i % bias.size()];
        if (relu) want[i] = std::max(0.0, want[i]);
        sum[i] += double(float(y[i]));
      }
      in_any_order([&, rows = rows, channels = channels, shift = shift] {
        Buffer<T> by(y, shift), from(y);
        Buffer<float> bb(bias, shift), add(y);
        emulated::bias_relu(grid, rows, channels, bb.data(), relu, by.data());
        emulated::convert(grid, std::int64_t(y.size()), static_cast<const T*>(from.data()), add.data(), true);
        return std::vector<Result>{{"y", by.values(), want, tolerance<T>}, {"sum", add.values(), sum, 1e-6}};
      });
    }
}

TYPED_TEST(CudaKernels, PlainConvolution) {
  using T = TypeParam;
  const ConvShape shapes[] = {
      {.n = 2, .h = 5, .w = 4, .c_in = 3, .c_out = 4, .kh = 3, .kw = 3, .pad_h = 1, .pad_w = 1},
      {.n = 1, .h = 7, .w = 6, .c_in = 4, .c_out = 6, .kh = 3, .kw = 2, .stride_h = 2, .stride_w = 3, .groups = 2},
      {2, 7, 7, 2, 2, 2, 3, 1, 1, 2, 1, 2, 2},  // dilated
      {.n = 1, .h = 4, .w = 4, .c_in = 8, .c_out = 8, .kh = 3, .kw = 3, .pad_h = 1, .pad_w = 1, .groups = 8},
  };
  reference().exact_convolution(true);
  for (const ConvShape& s : shapes)
    for (bool add : {false, true}) {
      const Shape in{s.n, s.h, s.w, s.c_in}, out{s.n, s.out_h(), s.out_w(), s.c_out},
          filter{s.c_out, s.kh, s.kw, s.c_in / s.groups};
      const Numbers x = pictures<T>("x", in.numel()), w = pictures<T>("w", filter.numel()),
                    dy = pictures<T>("dy", out.numel()), old = pictures<T>("old", in.numel());
      const Tensor tx = tensor<T>(x, in), tw = tensor<float>(w, filter), tdy = tensor<T>(dy, out);
      Tensor y = room<T>(out), dx = tensor<T>(old, in), dw = tensor<float>(w, filter);
      reference().conv2d(s, tx, tw, nullptr, false, y);
      reference().conv2d_backward_data(s, tdy, tw, dx, add);
      reference().conv2d_backward_filter(s, tx, tdy, dw, add);
      in_any_order([&] {
        Buffer<T> bx(x), bw(w), by{std::size_t(out.numel())}, bd(dy), bdx(old);
        Buffer<float> bdw(w);
        const T *cx = bx.data(), *cw = bw.data(), *cd = bd.data();
        emulated::plain_convolution(grid, s, cx, cw, by.data());
        emulated::plain_convolution_backward_data(grid, s, cd, cw, bdx.data(), add);
        emulated::plain_convolution_backward_filter(grid, s, cx, cd, bdw.data(), add);
        return std::vector<Result>{{"y", by.values(), y.values(), tolerance<T>},
                                   {"dx", bdx.values(), dx.values(), tolerance<T>},
                                   {"dw", bdw.values(), dw.values(), 3e-6}};
      });
    }
}

// ---- what *.kernel.cpp files launch ---------------------------------------------------------------------------------
TEST(CudaLaunch, SumsOfBlocksAndSegmentsByNeighbouringThreads) {
  constexpr std::int64_t blocks = 83, first = 2;
  const Numbers w = numbers("w", 64 * (first + blocks)), g = numbers("g", 64 * (first + blocks), -3, 3);
  Numbers squares(2 * (first + blocks), 0.0);
  for (std::int64_t i = 64 * first; i < 64 * (first + blocks); i++)
    squares[2 * (i / 64)] += w[i] * w[i], squares[2 * (i / 64) + 1] += g[i] * g[i];
  in_any_order([&] {
    Buffer<float> bw(w), bg(g), parts(Numbers(2 * (first + blocks), 0.0)), sums(Numbers{9, 0, 0, 1, 2, 0, 0});
    device_launch_sums<16>(nullptr, blocks, SquaredNormsOfBlocks<float>{first, bw.data(), bg.data(), parts.data()});
    const Numbers got = parts.values();
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
    const Numbers segments{9, 0, 0, 1 + sum(2, 40, 0), 2 + sum(2, 40, 1), sum(40, 80, 0), sum(40, 80, 1)};
    return std::vector<Result>{{"blocks", got, squares, 1e-6}, {"segments", sums.values(), segments, 1e-6}};
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
  const Numbers x = pictures<T>("x", 600), old = pictures<T>("old", 600);
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
