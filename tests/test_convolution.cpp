// The cpu backend's convolutions and matrix products against the reference backend in double: every algorithm × pass ×
// type, odd shapes.
#include <array>
#include <cstdio>

#include "core/cpu/convolution.h"
#include "core/cpu/winograd.h"
#include "tests/support.h"

namespace tandem::test {
namespace {
using namespace tandem::cpu;

// Spoils what it hands out, so that reading what was not written shows: call trim() before an operation.
struct Spoiling : MemorySource {
  void* acquire(std::size_t bytes) override {
    bytes = (bytes + 4095) / 4096 * 4096;
    void* p = std::aligned_alloc(4096, bytes);
    std::fill_n(static_cast<float*>(p), bytes / 4, std::nanf(""));
    return p;
  }
  void release(void* p, std::size_t) override { std::free(p); }
  const char* name() const override { return "spoiled memory"; }
  std::size_t segment_bytes() const override { return 0; }
};
struct TestMemory {
  CachingAllocator memory{std::make_unique<Spoiling>()};
};
struct TestConvolution : TestMemory, Convolution {
  explicit TestConvolution(int threads = 2) : Convolution(memory, threads) {}
};

struct Random {
  unsigned state = 1;
  double next() { return double(int(state = state * 1664525u + 1013904223u)) / 2147483648.0; }
  template <class T>
  std::vector<T> fill(std::int64_t n) {
    std::vector<T> v(static_cast<std::size_t>(n));
    for (T& e : v) e = T(float(next()));
    return v;
  }
};

struct Truth {
  Numbers y, dx, dw;
};

// In double; the op table holds the reference backend against PyTorch and finite differences.
template <class T>
Truth by_reference(const ConvShape& s, const std::vector<T>& x, const std::vector<float>& w, const std::vector<T>& dy) {
  static const auto backend = reference_backend(1);
  auto tensor = [&](const auto& v, const Shape& shape) {
    return Tensor::of(*backend, shape, Numbers(v.begin(), v.end()), DType::f64);
  };
  const Tensor tx = tensor(x, {s.n, s.h, s.w, s.c_in}), tw = tensor(w, {s.c_out, s.kh, s.kw, s.c_in / s.groups}),
               tdy = tensor(dy, {s.n, s.out_h(), s.out_w(), s.c_out});
  Tensor y = Tensor::like(tdy), dx = Tensor::like(tx), dw = Tensor::like(tw);
  backend->conv2d(s, tx, tw, nullptr, false, y);
  backend->conv2d_backward_data(s, tdy, tw, dx, false);
  backend->conv2d_backward_filter(s, tx, tdy, dw, false);
  return {y.values(), dx.values(), dw.values()};
}

// Of the largest value; infinite where there is a NaN.
template <class T>
double error(const std::vector<T>& got, const Numbers& expected) {
  return difference(Numbers(got.begin(), got.end()), expected, 1e-30).error;
}

// f32 sums differ in their last bits; bf16 pictures are rounded to 8 bits at the end, and oneDNN rounds the weights as
// well.
template <class T>
double tolerance(Algorithm a) {
  return dtype_of<T> == DType::bf16 ? (a == Algorithm::onednn ? 1.2e-2 : 4e-3) : a == Algorithm::winograd ? 5e-6 : 4e-6;
}

const Pass passes[] = {Pass::forward, Pass::backward_data, Pass::backward_filter};

template <class T>
void try_everything(const ConvShape& s, std::initializer_list<int> thread_counts) {
  Random random;
  const auto x = random.fill<T>(s.x_numel()), dy = random.fill<T>(s.y_numel());
  const auto w = random.fill<float>(s.w_numel()), bias = random.fill<float>(s.c_out);
  const Truth truth = by_reference(s, x, w, dy);
  const Algorithm algorithms[] = {Algorithm::winograd, Algorithm::direct, Algorithm::onednn, Algorithm::widened};
  for (std::size_t i = 0; i < 4 * thread_counts.size(); i++) {
    const Algorithm a = algorithms[i % 4];
    const int threads = thread_counts.begin()[i / 4];
    TestConvolution kept(threads);
    kept.only(a);
    auto conv = [&]() -> Convolution& {
      kept.memory.trim();
      return kept;
    };
    auto applies = [&](Pass p) {
      const auto found = kept.applicable<T>(s, p);
      return std::find(found.begin(), found.end(), a) != found.end();
    };
    const double bound = tolerance<T>(a);
    SCOPED_TRACE(testing::Message() << name_of(a) << ' ' << tandem::name_of(dtype_of<T>) << " n" << s.n << ' ' << s.h
                                    << 'x' << s.w << ' ' << s.c_in << "->" << s.c_out << " k" << s.kh << " s"
                                    << s.stride_h << " p" << s.pad_h << " d" << s.dilation_h << " g" << s.groups
                                    << " threads " << threads);
    if (applies(Pass::forward)) {
      std::vector<T> y(s.y_numel(), T(std::nanf("")));
      conv().forward(s, x.data(), w.data(), {}, y.data());
      EXPECT_LE(error(y, truth.y), bound) << "forward";
      Numbers expected(truth.y);
      for (std::size_t i = 0; i < expected.size(); i++)
        expected[i] = std::max(0.0, expected[i] + bias[i % std::size_t(s.c_out)]);
      conv().forward(s, x.data(), w.data(), {}, y.data(), {bias.data(), true});
      EXPECT_LE(error(y, expected), bound) << "forward, bias, relu";
    }
    auto gradient = [&]<class E>(Pass pass, E, Numbers expected, double bound, const auto& run) {
      if (!applies(pass)) return;
      std::vector<E> alone(expected.size(), E(std::nanf("")));
      run(alone.data(), false);
      EXPECT_LE(error(alone, expected), bound) << name_of(pass);
      auto sum = random.fill<E>(std::int64_t(expected.size()));
      for (std::size_t i = 0; i < sum.size(); i++) expected[i] += double(float(sum[i]));
      run(sum.data(), true);
      EXPECT_LE(error(sum, expected), bound) << name_of(pass) << ", add";
    };
    gradient(Pass::backward_data, T{}, truth.dx, bound,
             [&](T* dx, bool add) { conv().backward_data(s, dy.data(), w.data(), {}, dx, add); });
    gradient(Pass::backward_filter, float{}, truth.dw, std::min(bound, 5e-6),
             [&](float* dw, bool add) { conv().backward_filter(s, x.data(), dy.data(), dw, add); });
  }
}

ConvShape square(std::int64_t n, std::int64_t size, std::int64_t in, std::int64_t out, std::int64_t k = 3,
                 std::int64_t pad = 1, std::int64_t stride = 1) {
  return {n, size, size, in, out, k, k, stride, stride, pad, pad};
}

const ConvShape odd_squares[] = {
    square(2, 8, 16, 32),       square(1, 14, 32, 64),         square(2, 7, 64, 16),
    square(3, 4, 128, 64),      square(1, 1, 16, 16),          square(3, 7, 48, 80),
    square(2, 5, 96, 128),      square(1, 9, 16, 16, 3, 0),    square(2, 10, 32, 48, 3, 2),
    square(2, 4, 128, 128),     square(20, 4, 16, 16),         square(2, 12, 1, 6, 5, 2),
    square(2, 14, 6, 16, 5, 0), square(3, 13, 1, 32),          square(2, 9, 3, 16),
    square(1, 11, 3, 64),       square(2, 15, 3, 32, 7, 3, 2), square(2, 10, 2, 16, 3, 1, 2),
    square(1, 6, 4, 8, 1, 0),   square(2, 8, 16, 32, 3, 1, 2), square(2, 9, 32, 64, 1, 0, 2),
    square(1, 7, 64, 64, 1, 0), square(1, 8, 20, 12, 5, 2)};
// Not square, dilated, in groups.
const ConvShape other_shapes[] = {
    {2, 6, 11, 32, 16, 3, 3, 1, 1, 1, 1},         {2, 9, 6, 5, 16, 3, 2, 1, 2, 0, 1},
    {1, 12, 12, 16, 16, 3, 3, 1, 1, 2, 2, 2, 2},  {2, 9, 9, 32, 32, 3, 3, 1, 1, 1, 1, 1, 1, 2},
    {1, 8, 8, 32, 64, 3, 3, 2, 2, 1, 1, 1, 1, 4}, {2, 7, 7, 32, 32, 3, 3, 1, 1, 1, 1, 1, 1, 32}};

template <class T>
struct ConvolutionOf : testing::Test {};
using Types = testing::Types<float, bf16>;
TYPED_TEST_SUITE(ConvolutionOf, Types);

TYPED_TEST(ConvolutionOf, EqualsTheReference) {
  for (const ConvShape& s : odd_squares) try_everything<TypeParam>(s, {1, 2});
  for (const ConvShape& s : other_shapes) try_everything<TypeParam>(s, {1, 2});
}

// Filters larger than the data (transformed on the way), several blocks of channels, several chunks of tiles, more
// threads than work; and where many threads share one filter gradient.
TYPED_TEST(ConvolutionOf, WinogradsOtherPaths) {
  for (const ConvShape& s : {square(2, 4, 192, 320), square(40, 8, 32, 32), square(9, 12, 128, 64)})
    try_everything<TypeParam>(s, {2});
  try_everything<TypeParam>(square(5, 4, 272, 256), {3});                   // one chunk of tiles
  try_everything<TypeParam>({520, 1, 2, 272, 256, 3, 3, 1, 1, 1, 1}, {3});  // two chunks
  try_everything<TypeParam>(square(2, 8, 64, 64), {7});
}

TYPED_TEST(ConvolutionOf, ForwardAndDataGradientDoNotDependOnThreads) {
  using T = TypeParam;
  for (const ConvShape& s : {square(5, 14, 32, 64), square(5, 14, 6, 16, 5, 0), square(2, 4, 128, 128)})
    for (Algorithm a : {Algorithm::winograd, Algorithm::direct}) {
      Random random;
      const auto x = random.fill<T>(s.x_numel()), dy = random.fill<T>(s.y_numel());
      const auto w = random.fill<float>(s.w_numel());
      std::vector<T> y[2], dx[2];
      for (int k : {0, 1}) {
        TestConvolution conv(k + 1);
        conv.only(a);
        y[k].resize(s.y_numel()), dx[k].resize(s.x_numel());
        conv.forward(s, x.data(), w.data(), {}, y[k].data());
        conv.backward_data(s, dy.data(), w.data(), {}, dx[k].data(), false);
        std::vector<float> dw(s.w_numel()), again(s.w_numel());
        for (auto* d : {&dw, &again}) conv.backward_filter(s, x.data(), dy.data(), d->data(), false);
        const bool chosen = conv.choices()[0].algorithm == a;
        EXPECT_TRUE(!chosen || dw == again) << "the same threads, the same bits";
        if (!chosen) y[k].clear(), dx[k].clear();
      }
      auto bits_equal = [](const std::vector<T>& p, const std::vector<T>& q) {
        return p.size() == q.size() &&
               std::equal(p.begin(), p.end(), q.begin(), [](T u, T v) { return float(u) == float(v); });
      };
      EXPECT_TRUE(bits_equal(y[0], y[1]));
      EXPECT_TRUE(bits_equal(dx[0], dx[1]));
    }
}

TEST(Convolution, PreparedWeightsAreKeptUntilTheyChange) {
  for (const ConvShape& s : {square(2, 8, 32, 32), square(2, 8, 32, 32, 3, 1, 2), square(1, 8, 3, 16)})
    for (Algorithm a : {Algorithm::winograd, Algorithm::onednn}) {
      TestConvolution conv;
      conv.only(a);
      Random random;
      const auto x = random.fill<float>(s.x_numel()), dy = random.fill<float>(s.y_numel());
      auto w = random.fill<float>(s.w_numel());
      const int owner = 0;
      for (std::uint64_t step = 0; step < 3; step++) {
        for (float& v : w) v = -0.5f * v;
        const Truth truth = by_reference(s, x, w, dy);
        for (int again = 0; again < 2; again++) {
          std::vector<float> y(s.y_numel()), dx(s.x_numel());
          conv.forward(s, x.data(), w.data(), {&owner, step}, y.data());
          conv.backward_data(s, dy.data(), w.data(), {&owner, step}, dx.data(), false);
          EXPECT_LE(error(y, truth.y), 5e-6);
          EXPECT_LE(error(dx, truth.dx), 5e-6);
        }
      }
      // The middle of a filter changes behind its count: the prepared form is what is used. (The contract, not a wish.)
      const auto chosen = conv.choices()[0].algorithm;
      const bool keeps =
          chosen == Algorithm::onednn || (chosen == Algorithm::winograd && winograd::wants_prepared(s, false));
      if (keeps && s.c_in > 3) {
        std::vector<float> before(s.y_numel()), after(s.y_numel());
        conv.forward(s, x.data(), w.data(), {&owner, 2}, before.data());
        w[1] += 10;
        conv.forward(s, x.data(), w.data(), {&owner, 2}, after.data());
        EXPECT_EQ(before, after);
        conv.forget(&owner);
        conv.forward(s, x.data(), w.data(), {&owner, 2}, after.data());
        EXPECT_LE(error(after, by_reference(s, x, w, dy).y), 5e-6);
      }
    }
}

TEST(Convolution, AsksForNoMemoryAfterTheSecondCall) {
  TestConvolution conv;
  Random random;
  const ConvShape shapes[] = {square(4, 8, 32, 32), square(4, 8, 32, 64, 3, 1, 2), square(4, 12, 3, 16)};
  const int owners[3] = {};
  for (std::uint64_t step = 0; step < 5; step++) {
    const std::uint64_t before = conv.memory.statistics().source_calls;
    for (int i = 0; i < 3; i++) {
      const ConvShape& s = shapes[i];
      const auto x = random.fill<float>(s.x_numel()), w = random.fill<float>(s.w_numel());
      auto y = random.fill<float>(s.y_numel()), dx = x;
      auto dw = w;
      conv.forward(s, x.data(), w.data(), {owners + i, step}, y.data());
      conv.backward_data(s, y.data(), w.data(), {owners + i, step}, dx.data(), true);
      conv.backward_filter(s, x.data(), y.data(), dw.data(), true);
    }
    EXPECT_TRUE(step < 2 || conv.memory.statistics().source_calls == before) << step;
  }
}

TEST(Convolution, TheStopwatchChoosesAndLeavesWhatIsAddedToAlone) {
  TestConvolution conv;
  Random random;
  const ConvShape s = square(4, 8, 32, 32);
  const auto x = random.fill<float>(s.x_numel()), dy = random.fill<float>(s.y_numel());
  const auto w = random.fill<float>(s.w_numel());
  const Truth truth = by_reference(s, x, w, dy);
  std::vector<float> dx(s.x_numel(), 1.f), dw(s.w_numel(), 1.f);
  conv.backward_data(s, dy.data(), w.data(), {}, dx.data(), true);
  conv.backward_filter(s, x.data(), dy.data(), dw.data(), true);
  for (float& v : dx) v -= 1;
  for (float& v : dw) v -= 1;
  EXPECT_LE(error(dx, truth.dx), 5e-6);
  EXPECT_LE(error(dw, truth.dw), 5e-6);
  ASSERT_EQ(conv.choices().size(), 2u);
  for (const Choice& c : conv.choices()) {
    EXPECT_EQ(c.milliseconds.size(), 2u);
    EXPECT_FALSE(c.library_kernel.empty());
    const std::map<Algorithm, double> times(c.milliseconds.begin(), c.milliseconds.end());
    for (auto [algorithm, time] : times) EXPECT_LE(times.at(c.algorithm), time) << name_of(algorithm);
  }
  conv.exact(true);
  conv.backward_data(s, dy.data(), w.data(), {}, dx.data(), false);
  EXPECT_EQ(conv.choices()[0].algorithm, Algorithm::onednn);
  conv.exact(false), conv.deterministic(true);
  conv.backward_data(s, dy.data(), w.data(), {}, dx.data(), false);
  EXPECT_EQ(conv.choices()[0].algorithm, Algorithm::winograd);
  EXPECT_TRUE(conv.choices()[0].milliseconds.empty());
}

// Every shape of LeNet-5, SmallCNN, ResNet-20 and ResNet-18 has at least one algorithm that is not the library's
// reference.
TEST(Convolution, NoReferenceKernelForTheModels) {
  TestConvolution conv;
  std::vector<ConvShape> shapes = {square(128, 28, 1, 6, 5, 2), square(128, 14, 6, 16, 5, 0), square(128, 28, 1, 32),
                                   square(128, 14, 32, 64),     square(128, 32, 3, 16),       square(128, 32, 3, 64)};
  for (auto [size, c] : {std::pair{32, 16}, {32, 64}, {16, 32}, {16, 128}, {8, 64}, {8, 256}, {4, 512}})
    shapes.push_back(square(128, size, c, c));
  for (auto [size, c] : {std::pair{32, 16}, {16, 32}, {32, 64}, {16, 128}, {8, 256}}) {
    shapes.push_back(square(128, size, c, 2 * c, 3, 1, 2));
    shapes.push_back(square(128, size, c, 2 * c, 1, 0, 2));
  }
  auto look = [&]<class T>(T) {
    if (dtype_of<T> == DType::bf16 && !OneDnn::has_bf16()) return;
    for (const ConvShape& s : shapes)
      for (Pass p : passes) {
        if (s.c_in <= 3 && p == Pass::backward_data) continue;  // never wanted
        const auto found = conv.applicable<T>(s, p);
        const bool others = found[0] == Algorithm::winograd || found[0] == Algorithm::direct;
        EXPECT_TRUE(others || !conv.library().kernel<T>(s, p).reference())
            << s.c_in << "->" << s.c_out << " at " << s.h << " k" << s.kh << ' ' << name_of(p);
      }
  };
  look(float{});
  look(bf16{});
}

template <class T>
void matrices(int threads) {
  TestConvolution conv(threads);
  OneDnn& library = conv.library();
  const double bound = dtype_of<T> == DType::bf16 ? 1.2e-2 : 2e-6;
  Random random;
  for (auto [m, n, k] : {std::array<int, 3>{1, 1, 1}, {128, 10, 84}, {5, 7, 9}, {3, 120, 400}, {64, 33, 17}}) {
    SCOPED_TRACE(testing::Message() << m << ' ' << n << ' ' << k << ' ' << tandem::name_of(dtype_of<T>));
    const auto x = random.fill<T>(m * k), dy = random.fill<T>(m * n);
    const auto w = random.fill<float>(n * k), bias = random.fill<float>(n);
    auto [y, dx, dw] = by_reference<T>({.n = m, .h = 1, .w = 1, .c_in = k, .c_out = n}, x, w, dy);
    Numbers cut = y;
    for (std::size_t i = 0; i < cut.size(); i++) cut[i] = std::max(0.0, y[i] + bias[i % bias.size()]);
    std::vector<T> got(m * n), gx(m * k);
    std::vector<float> gw(n * k);
    auto writable = [](const auto& v) { return const_cast<typename std::decay_t<decltype(v)>::value_type*>(v.data()); };
    auto linear = [&](Pass pass, const auto& x, const auto& w, const auto& y, WeightKey key, bool add,
                      const Epilogue& epilogue = {}) {
      library.linear<T>(
          {pass, OneDnn::linear_shape(m, n, k), writable(x), writable(w), writable(y), key, add, epilogue});
    };
    const int owner = 0;
    for (int again = 0; again < 2; again++) {
      linear(Pass::forward, x, w, got, {&owner, 1}, false);
      EXPECT_LE(error(got, y), bound);
      linear(Pass::forward, x, w, got, {}, false, {bias.data(), true});
      EXPECT_LE(error(got, cut), bound);
      linear(Pass::backward_data, gx, w, dy, {&owner, 1}, false);
      EXPECT_LE(error(gx, dx), bound);
      linear(Pass::backward_filter, x, gw, dy, {}, false);
      EXPECT_LE(error(gw, dw), 2e-6);
    }
    library.forget(&owner);
    linear(Pass::backward_data, gx, w, dy, {}, true);
    for (auto& v : dx) v *= 2;
    EXPECT_LE(error(gx, dx), bound);
    linear(Pass::backward_filter, x, gw, dy, {}, true);
    for (auto& v : dw) v *= 2;
    EXPECT_LE(error(gw, dw), 2e-6);

    for (bool ta : {false, true})
      for (bool tb : {false, true})
        for (bool add : {false, true}) {
          const auto a = random.fill<T>(m * k), b = random.fill<T>(k * n);
          auto c = random.fill<T>(m * n);
          Numbers expected(m * n);
          for (int i = 0; i < m; i++)
            for (int j = 0; j < n; j++) {
              double sum = 0;
              for (int l = 0; l < k; l++)
                sum += double(float(a[ta ? l * m + i : i * k + l])) * double(float(b[tb ? j * k + l : l * n + j]));
              expected[i * n + j] = sum + (add ? double(float(c[i * n + j])) : 0);
            }
          if (!add) std::fill(c.begin(), c.end(), T(std::nanf("")));
          library.gemm<T>(ta, tb, m, n, k, a.data(), b.data(), c.data(), add);
          EXPECT_LE(error(c, expected), bound) << ta << tb << add;
        }
  }
}

TEST(OneDnn, LinearAndGemmAreExact) {
  std::printf("%s\n", OneDnn::version().c_str());
  for (int threads : {1, 2}) {
    matrices<float>(threads);
    if (OneDnn::has_bf16()) matrices<bf16>(threads);
  }
}

// oneDNN 2.6.3's bf16 weight gradient is garbage where the output of a padded picture is one pixel wide and the stride
// is larger than 1. Every stride × padding × width; the rest is drawn. TANDEM_SWEEP=1 takes 40 times as many.
TEST(Convolution, ThinPicturesInBf16) {
  if (!OneDnn::has_bf16()) GTEST_SKIP() << "this CPU multiplies no bf16";
  Random random;
  auto from_to = [&](int low, int high) { return low + std::int64_t((random.next() + 1) / 2 * (high - low + 1)); };
  std::int64_t wrong = 0, tried = 0;
  auto check = [&](Convolution& conv, int threads, const ConvShape& s) {
    if (s.h + 2 * s.pad_h <= s.dilation_h * (s.kh - 1) || s.w + 2 * s.pad_w <= s.dilation_w * (s.kw - 1)) return;
    std::vector<bf16> x(s.x_numel()), dy(s.y_numel());
    for (std::vector<bf16>* v : {&x, &dy})
      for (bf16& e : *v) e = bf16(float(from_to(-2, 2)));
    const Truth truth = by_reference(s, x, std::vector<float>(s.w_numel()), dy);
    std::vector<float> dw(s.w_numel(), NAN);
    conv.backward_filter<bf16>(s, x.data(), dy.data(), dw.data(), false);
    tried++;
    if (const double e = error(dw, truth.dw); !(e < 1e-5) && wrong++ < 10)
      ADD_FAILURE() << threads << " threads, x " << s.n << ',' << s.h << ',' << s.w << ',' << s.c_in << ", " << s.c_out
                    << " filters of " << s.kh << ',' << s.kw << ", stride " << s.stride_h << ',' << s.stride_w
                    << ", padding " << s.pad_h << ',' << s.pad_w << ", dilation " << s.dilation_w << ", groups "
                    << s.groups << ", output " << s.out_h() << ',' << s.out_w() << ": error " << e << " of the largest";
  };
  for (int threads : {1, 2, 4}) {
    TestConvolution conv(threads);
    conv.deterministic(true);
    for (int round = 0; round < (std::getenv("TANDEM_SWEEP") ? 40 : 1); round++)
      for (std::int64_t stride = 1; stride <= 5; stride++)
        for (std::int64_t pad = 0; pad <= 2; pad++)
          for (std::int64_t width = 1; width <= 6; width++) {
            const std::int64_t groups = from_to(1, 4) == 1 ? 2 : 1, dilation = from_to(1, 4) == 1 ? 2 : 1;
            const std::int64_t n = from_to(1, 8), height = from_to(5, 14), c_in = groups * from_to(1, 33),
                               c_out = groups * from_to(1, 33), kh = from_to(1, 5), kw = from_to(1, 5),
                               stride_h = from_to(1, 3), pad_h = from_to(0, 2);
            check(conv, threads,
                  {n, height, width, c_in, c_out, kh, kw, stride_h, stride, pad_h, pad, dilation, dilation, groups});
          }
  }
  EXPECT_EQ(wrong, 0) << "of " << tried;
}

// 1×1 filters in bf16, pixels × channels in × channels out: small integers, so that every sum is exact. `make test`
// takes those around which the library's kernels change; TANDEM_SWEEP=1 takes all of 1–130 × 1–33 × 1–33 (more than 5
// minutes).
TEST(Convolution, OddChannelsInBf16) {
  if (!OneDnn::has_bf16()) GTEST_SKIP() << "this CPU multiplies no bf16";
  const bool all = std::getenv("TANDEM_SWEEP") != nullptr;
  const auto taken = [&](std::int64_t channels) {
    return all || channels == 1 || channels == 15 || channels == 17 || channels > 31;
  };
  std::int64_t wrong = 0, tried = 0;
  for (std::int64_t c_in = 1; c_in <= 33; c_in++)
    for (std::int64_t c_out = 1; c_out <= 33; c_out++) {
      if (!taken(c_in) || !taken(c_out)) continue;
      TestConvolution conv;
      conv.deterministic(true);
      Random random;
      auto integers = [&]<class T>(std::vector<T> v) {
        for (T& e : v) e = T(float(int(random.next() * 2.5)));
        return v;
      };
      const auto w = integers(std::vector<float>(c_in * c_out));
      for (std::int64_t pixels = 1; pixels <= 130; pixels++) {
        if (!all && pixels % 30 > 1 && pixels % 30 < 28) continue;
        const ConvShape s{.n = 1, .h = pixels, .w = 1, .c_in = c_in, .c_out = c_out};
        const auto x = integers(std::vector<bf16>(s.x_numel())), dy = integers(std::vector<bf16>(s.y_numel()));
        const Truth truth = by_reference(s, x, w, dy);
        std::vector<bf16> y(s.y_numel(), bf16(NAN)), dx(s.x_numel(), bf16(NAN));
        std::vector<float> dw(s.w_numel(), NAN);
        conv.forward<bf16>(s, x.data(), w.data(), {}, y.data());
        conv.backward_data<bf16>(s, dy.data(), w.data(), {}, dx.data(), false);
        conv.backward_filter<bf16>(s, x.data(), dy.data(), dw.data(), false);
        const double errors[] = {error(y, truth.y), error(dx, truth.dx), error(dw, truth.dw)};
        for (int pass = 0; pass < 3; pass++, tried++)
          if (!(errors[pass] == 0) && wrong++ < 10)
            ADD_FAILURE() << name_of(passes[pass]) << ", " << pixels << " pixels, " << c_in << " → " << c_out
                          << " channels: error " << errors[pass] << " of the largest";
      }
    }
  EXPECT_EQ(wrong, 0) << "of " << tried;
}

}  // namespace
}  // namespace tandem::test
