// The CPU's memory-bound operations against the memory itself: each is timed beside plain loops that read and write the
// same arrays the same number of times and compute nothing. `share` is operation / plain: 1.0 is all that the machine
// can give. The two alternate, A B A B; medians and best times are printed (on a busy machine only the best mean
// something), and the last lines repeat the first, to show how steady the machine was.
//   bench_kernels [threads] [repetitions]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <vector>

#include "autograd/ops.h"
#include "core/cpu/norm.h"
#include "core/cpu/pool.h"
#include "core/cpu/rows.h"
#include "core/launch.h"

using namespace tandem;

namespace {

int threads = 2, repetitions = 15;

double milliseconds(const std::function<void()>& f) {
  auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}
double median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + v.size() / 2, v.end());
  return v[v.size() / 2];
}

template <class T>
struct Array {
  explicit Array(std::int64_t n)
      : n(n), p(static_cast<T*>(std::aligned_alloc(4096, (n * sizeof(T) + 4095) / 4096 * 4096))) {
    for (std::int64_t i = 0; i < n; i++) p[i] = static_cast<T>(static_cast<float>(i * 7 % 1001) / 500 - 1);
  }
  ~Array() { std::free(p); }
  Array(const Array&) = delete;
  std::int64_t n;
  T* p;
};

volatile std::uint32_t sink;

// One pass over memory: reads every word of `from`, and writes as many words to `to` as it has.
void touch(std::initializer_list<const void*> from, void* to, std::size_t bytes) {
  parallel_ranges(threads, static_cast<std::int64_t>(bytes / 4), 64, [&](std::int64_t begin, std::int64_t end) {
    std::uint32_t sum = 0;
    const auto* first = static_cast<const std::uint32_t*>(*from.begin());
    const auto* second = static_cast<const std::uint32_t*>(*(from.end() - 1));
    auto* out = static_cast<std::uint32_t*>(to);
    if (from.size() == 1 && !out) {
#pragma omp simd reduction(+ : sum)
      for (std::int64_t i = begin; i < end; i++) sum += first[i];
    } else if (from.size() == 1) {
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
         const std::function<void()>& plain) {
  std::vector<double> a, b;
  for (int i = 0; i < repetitions + 2; i++) {
    double ta = milliseconds(f), tb = milliseconds(plain);
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
  row(
      "batch norm+relu", type, shape,
      [&] {
        cpu::batch_norm<T>(threads, s, x.p, nullptr, nullptr, gamma.p, beta.p, running.p, variance.p, y.p, mean.p,
                           inverse.p);
      },
      [&] { touch({x.p}, nullptr, bytes), touch({x.p}, y.p, bytes); });
  row(
      "  +residual", type, shape,
      [&] {
        cpu::batch_norm<T>(threads, s, x.p, nullptr, residual.p, gamma.p, beta.p, running.p, variance.p, y.p, mean.p,
                           inverse.p);
      },
      [&] {
        touch({x.p}, nullptr, bytes), touch({x.p, residual.p}, y.p, bytes);
      });
  cpu::NormBackward<T> out;
  out.dx = dx.p, out.dgamma = dgamma.p, out.dbeta = dbeta.p;
  row(
      "  backward", type, shape,
      [&] { cpu::batch_norm_backward<T>(threads, s, x.p, nullptr, dy.p, gamma.p, beta.p, mean.p, inverse.p, out); },
      [&] {
        touch({x.p, dy.p}, nullptr, bytes), touch({x.p, dy.p}, dx.p, bytes);
      });
  out.dresidual = dy.p;
  row(
      "  backward +residual", type, shape,
      [&] { cpu::batch_norm_backward<T>(threads, s, x.p, y.p, dy.p, gamma.p, beta.p, mean.p, inverse.p, out); },
      [&] {
        touch({x.p, dy.p}, nullptr, bytes), touch({y.p}, dy.p, bytes), touch({x.p, dy.p}, dx.p, bytes);
      });
  row(
      "  inference", type, shape,
      [&] { cpu::batch_norm_inference<T>(threads, s, x.p, nullptr, gamma.p, beta.p, mean.p, gamma.p, y.p); },
      [&] { touch({x.p}, y.p, bytes); });
  row(
      "sum rows", type, shape, [&] { cpu::sum_rows<T>(threads, rows, c, dy.p, dbeta.p, false); },
      [&] { touch({dy.p}, nullptr, bytes); });
}

template <class T>
void pools(const char* type, const char* shape, PoolShape s) {
  const std::int64_t n = s.n * s.h * s.w * s.c, m = s.n * s.out_h() * s.out_w() * s.c;
  Array<T> x(n), y(m), dx(n), dy(m);
  std::vector<std::uint8_t> argmax(m);
  const std::size_t bytes = n * sizeof(T), small = m * sizeof(T);
  row(
      "max pool+relu", type, shape, [&] { cpu::max_pool<T>(threads, s, x.p, true, y.p, argmax.data()); },
      [&] { touch({x.p}, nullptr, bytes), touch({x.p}, y.p, small), touch({x.p}, argmax.data(), m); });
  row(
      "  backward", type, shape, [&] { cpu::max_pool_backward<T>(threads, s, dy.p, argmax.data(), dx.p, false); },
      [&] { touch({dy.p}, nullptr, small), touch({x.p}, dx.p, bytes); });
  row(
      "average pool", type, shape, [&] { cpu::average_pool<T>(threads, s, x.p, y.p); },
      [&] { touch({x.p}, nullptr, bytes), touch({x.p}, y.p, small); });
  row(
      "  backward", type, shape, [&] { cpu::average_pool_backward<T>(threads, s, dy.p, dx.p, false); },
      [&] { touch({dy.p}, nullptr, small), touch({x.p}, dx.p, bytes); });
}

template <class T>
void losses(const char* type, const char* shape, std::int64_t rows, std::int64_t classes) {
  Array<T> x(rows * classes), dx(rows * classes);
  Array<float> p(rows * classes);
  std::vector<std::int32_t> labels(rows);
  for (std::int64_t r = 0; r < rows; r++) labels[r] = static_cast<std::int32_t>(r % classes);
  const std::size_t bytes = rows * classes * sizeof(T);
  row(
      "cross-entropy", type, shape,
      [&] { cpu::cross_entropy<T>(threads, rows, classes, x.p, labels.data(), 0.1, p.p, nullptr); },
      [&] { touch({x.p}, p.p, bytes); });
  row(
      "  backward", type, shape,
      [&] { cpu::cross_entropy_backward<T>(threads, rows, classes, p.p, labels.data(), 0.1, 1.f, dx.p, false); },
      [&] { touch({x.p}, dx.p, bytes); });
}

// b is stretched along some axes of a; a is read and y written once.
void broadcasts() {
  std::unique_ptr<Backend> backend = cpu_backend(threads);
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
    Variable a(Tensor::full(*backend, s.a, 1.5), true), b(Tensor::full(*backend, s.b, 2), true);
    const std::int64_t n = s.a.numel();
    Array<float> from(n), to(n);
    const bool both = s.b.numel() == n;
    row(
        "mul", "f32", s.name,
        [&] {
          NoGrad off;
          a* b;
        },
        [&] {
          both ? touch({a.value().raw(), from.p}, to.p, 4 * n) : touch({from.p}, to.p, 4 * n);
        });
    Variable y = a * b;
    const Tensor dy = Tensor::full(*backend, s.a, 1);
    // Reads dy, a and b, writes da and db.
    row(
        "  backward", "f32", s.name,
        [&] {
          GradientSlot slots[] = {GradientSlot(a.leaf()), GradientSlot(b.leaf())};
          y.node()->backward(dy, slots);
          a.zero_grad(), b.zero_grad();
        },
        [&] {
          touch({dy.raw()}, to.p, 4 * n), touch({from.p, dy.raw()}, both ? to.p : nullptr, 4 * n);
        });
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
  broadcasts();
  table<float>("f32");
  table<bf16>("bf16");
  norms<float>("f32", "128x32x32x16", 128 * 32 * 32, 16);
}
