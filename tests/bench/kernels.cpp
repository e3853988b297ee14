// The CPU's memory-bound operations against the memory itself: each is timed beside plain loops that read and write the
// same arrays the same number of times and compute nothing. `share` is operation / plain: 1.0 is all that the machine
// can give. The two alternate, A B A B; medians and best times are printed (on a busy machine only the best mean
// something), and the last lines repeat the first, to show how steady the machine was.
//   bench_kernels [threads] [repetitions]
#include <cstdio>

#include "autograd/ops.h"
#include "core/launch.h"
#include "tests/bench/timing.h"

using namespace tandem;

namespace {

int threads = 2, repetitions = 15;

std::unique_ptr<Backend> device;

template <class T>
struct Array : Tensor {
  explicit Array(std::int64_t n) : Tensor(*device, {n}, dtype_of<T>), p(write<T>()) {
    for (std::int64_t i = 0; i < n; i++) p[i] = static_cast<T>(static_cast<float>(i * 7 % 1001) / 500 - 1);
  }
  T* p;
};

volatile std::uint32_t sink;

// One pass over memory: reads every word of `from`, one or two arrays, and writes as many words to `to` as it has.
struct Pass {
  std::vector<const void*> from;
  void* to;
  std::size_t bytes;
};
void touch(const Pass& pass) {
  parallel_ranges(threads, static_cast<std::int64_t>(pass.bytes / 4), 64, [&](std::int64_t begin, std::int64_t end) {
    std::uint32_t sum = 0;
    const auto* first = static_cast<const std::uint32_t*>(pass.from.front());
    const auto* second = static_cast<const std::uint32_t*>(pass.from.back());
    auto* out = static_cast<std::uint32_t*>(pass.to);
    if (pass.from.size() == 1 && !out) {
#pragma omp simd reduction(+ : sum)
      for (std::int64_t i = begin; i < end; i++) sum += first[i];
    } else if (pass.from.size() == 1) {
#pragma omp simd
      for (std::int64_t i = begin; i < end; i++) out[i] = first[i];
    } else if (!out) {
#pragma omp simd reduction(+ : sum)
      for (std::int64_t i = begin; i < end; i++) sum += first[i] + second[i];
    } else {
#pragma omp simd
      for (std::int64_t i = begin; i < end; i++) out[i] = first[i] + second[i];
    }
    sink = sum;
  });
}

void row(const char* op, const char* type, const char* shape, const std::function<void()>& f,
         const std::vector<Pass>& plain) {
  std::vector<double> a, b;
  for (int i = 0; i < repetitions + 2; i++) {
    double ta = milliseconds(f), tb = milliseconds([&] { std::for_each(plain.begin(), plain.end(), touch); });
    if (i >= 2) a.push_back(ta), b.push_back(tb);
  }
  auto best = [](const std::vector<double>& v) { return *std::min_element(v.begin(), v.end()); };
  std::printf("%-22s %-4s %-17s %8.3f %8.3f %5.2f   %8.3f %8.3f %5.2f\n", op, type, shape, median(a), median(b),
              median(a) / median(b), best(a), best(b), best(a) / best(b));
  std::fflush(stdout);
}

template <class T>
void norms(const char* type, const char* shape, std::int64_t rows, std::int64_t c) {
  const std::int64_t n = rows * c;
  const std::size_t bytes = n * sizeof(T);
  Array<T> x(n), y(n), dy(n), dx(n), residual(n);
  Array<float> gamma(c), beta(c), mean(c), inverse(c), running(c), variance(c), dgamma(c), dbeta(c);
  NormShape s{rows, c};
  s.relu = true;
  auto forward = [&](const Tensor* added) {
    device->batch_norm(s, x, added, gamma, beta, running, variance, y, mean, inverse);
  };
  Backend::NormGradients out{.dx = &dx, .dgamma = &dgamma, .dbeta = &dbeta};
  auto backward = [&](const Tensor* masked) {
    device->batch_norm_backward(s, x, masked, dy, gamma, beta, mean, inverse, out);
  };
  const Pass reads{{x.p}, nullptr, bytes}, writes_y{{x.p}, y.p, bytes}, reads_both{{x.p, dy.p}, nullptr, bytes},
      writes_dx{{x.p, dy.p}, dx.p, bytes};
  row("batch norm+relu", type, shape, [&] { forward(nullptr); }, {reads, writes_y});
  row("  +residual", type, shape, [&] { forward(&residual); }, {reads, {{x.p, residual.p}, y.p, bytes}});
  row("  backward", type, shape, [&] { backward(nullptr); }, {reads_both, writes_dx});
  out.dresidual = &dy;
  row("  backward +residual", type, shape, [&] { backward(&y); }, {reads_both, {{y.p}, dy.p, bytes}, writes_dx});
  auto inference = [&] { device->batch_norm_inference(s, x, nullptr, gamma, beta, mean, gamma, y); };
  row("  inference", type, shape, inference, {writes_y});
  const Pass reads_dy{{dy.p}, nullptr, bytes};
  row("sum rows", type, shape, [&] { device->sum_rows(dy, dbeta, false); }, {reads_dy});
}

template <class T>
void pools(const char* type, const char* shape, PoolShape s) {
  const std::int64_t n = s.n * s.h * s.w * s.c, m = s.n * s.out_h() * s.out_w() * s.c;
  Array<T> x(n), y(m), dx(n), dy(m);
  Array<std::uint8_t> argmax(m);
  const std::size_t bytes = n * sizeof(T), small = m * sizeof(T);
  const Pass reads{{x.p}, nullptr, bytes}, writes_y{{x.p}, y.p, small}, writes_argmax{{x.p}, argmax.p, std::size_t(m)};
  const std::vector<Pass> backward{{{dy.p}, nullptr, small}, {{x.p}, dx.p, bytes}};
  auto max_pool = [&] { device->max_pool(s, x, true, y, &argmax); };
  row("max pool+relu", type, shape, max_pool, {reads, writes_y, writes_argmax});
  row(
      "  backward", type, shape, [&] { device->max_pool_backward(s, dy, argmax, dx, false); }, backward);
  row("average pool", type, shape, [&] { device->average_pool(s, x, y); }, {reads, writes_y});
  row(
      "  backward", type, shape, [&] { device->average_pool_backward(s, dy, dx, false); }, backward);
}

template <class T>
void losses(const char* type, const char* shape, std::int64_t rows, std::int64_t classes) {
  Array<T> x(rows * classes), dx(rows * classes);
  Array<float> p(rows * classes), loss(1);
  Array<std::int32_t> labels(rows);
  for (std::int64_t r = 0; r < rows; r++) labels.p[r] = static_cast<std::int32_t>(r % classes);
  const std::size_t bytes = rows * classes * sizeof(T);
  const Tensor logits = x.reshape({rows, classes});
  Tensor gradient = dx.reshape({rows, classes});
  const Pass writes_p{{x.p}, p.p, bytes}, writes_dx{{x.p}, dx.p, bytes};
  auto forward = [&] { device->cross_entropy(logits, labels, 0.1, loss, p, nullptr); };
  auto backward = [&] { device->cross_entropy_backward(p, labels, 0.1, loss, gradient, false); };
  row("cross-entropy", type, shape, forward, {writes_p});
  row("  backward", type, shape, backward, {writes_dx});
}

// b is stretched along some axes of a; a is read and y written once.
void broadcasts() {
  const struct {
    const char* name;
    Shape a, b;
  } shapes[] = {{"NHWC·NHWC", {64, 32, 32, 64}, {64, 32, 32, 64}},
                {"NHWC·C", {64, 32, 32, 64}, {64}},
                {"NHWC·N11C", {64, 32, 32, 64}, {64, 1, 1, 64}},
                {"NHWC·NHW1", {64, 32, 32, 64}, {64, 32, 32, 1}},
                {"NHWC·N11C C=10", {64, 64, 64, 10}, {64, 1, 1, 10}},
                {"NC·C", {4096, 1000}, {1000}},
                {"NC·N1", {4096, 1000}, {4096, 1}},
                {"NC·1", {4096, 1000}, {1}}};
  for (const auto& s : shapes) {
    Variable a(Tensor::full(*device, s.a, 1.5), true), b(Tensor::full(*device, s.b, 2), true);
    const std::int64_t n = s.a.numel();
    Array<float> from(n), to(n);
    const bool both = s.b.numel() == n;
    const std::size_t bytes = 4 * std::size_t(n);
    auto product = [&] {
      NoGrad off;
      a* b;
    };
    Pass writes_y{{from.p}, to.p, bytes};
    if (both) writes_y.from.push_back(a.value().raw());
    row("mul", "f32", s.name, product, {writes_y});
    Variable y = a * b;
    const Tensor dy = Tensor::full(*device, s.a, 1);
    // Reads dy, a and b, writes da and db.
    auto gradients = [&] {
      GradientSlot slots[] = {GradientSlot(a.leaf()), GradientSlot(b.leaf())};
      y.node()->backward(dy, slots);
      a.zero_grad();
      b.zero_grad();
    };
    const Pass first{{dy.raw()}, to.p, bytes}, second{{from.p, dy.raw()}, both ? to.p : nullptr, bytes};
    row("  backward", "f32", s.name, gradients, {first, second});
  }
}

template <class T>
void table(const char* type) {
  norms<T>(type, "128x32x32x16", 128 * 32 * 32, 16);
  norms<T>(type, "128x16x16x32", 128 * 16 * 16, 32);
  norms<T>(type, "128x8x8x64", 128 * 8 * 8, 64);
  norms<T>(type, "128x32x32x64", 128 * 32 * 32, 64);
  norms<T>(type, "128x4x4x512", 128 * 4 * 4, 512);
  norms<T>(type, "128x28x28x6", 128 * 28 * 28, 6);
  pools<T>(type, "128x28x28x32", {128, 28, 28, 32});
  pools<T>(type, "128x28x28x6", {128, 28, 28, 6});
  pools<T>(type, "128x32x32x64 3/2", {128, 32, 32, 64, 3, 3, 2, 2, 1, 1});
  pools<T>(type, "128x8x8x64 all", {128, 8, 8, 64, 8, 8, 8, 8});
  pools<T>(type, "16x32x32x64 3/2", {16, 32, 32, 64, 3, 3, 2, 2, 1, 1});
  losses<T>(type, "128x10", 128, 10);
  losses<T>(type, "128x1000", 128, 1000);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) threads = std::atoi(argv[1]);
  if (argc > 2) repetitions = std::atoi(argv[2]);
  std::printf("%d threads, %d repetitions, ms    median: op    plain share   best: op    plain share\n", threads,
              repetitions);
  device = cpu_backend(threads);
  broadcasts();
  table<float>("f32");
  table<bf16>("bf16");
  norms<float>("f32", "128x32x32x16", 128 * 32 * 32, 16);
  device.reset();
}
