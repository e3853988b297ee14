// What only a GPU can tell, for `make gpu-check STAGE=ops|train|bench` (tests/gpu_check.sh). Prints one table; exits with 1 where
// a line of it does not hold.
//   ops    convolutions and products against double on the host, max|a − b| ≤ 4·ε·√K·(|x|∗|w|); twice, for the same bits
//   train  the same seed on the host and on the GPU: steps 1–20, and 200 steps smoothed beside the host's own spread
//   bench  milliseconds of a training step (one replay), and the card's ceilings of matrix product and copy
//   build/bench_gpu ops|train|bench [JSONL]
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "core/random.h"
#include "cuda/device.h"
#include "datasets/loader.h"
#include "datasets/synthetic.h"
#include "layers/fit.h"
#include "layers/metrics.h"
#include "layers/models.h"
#include "layers/options.h"
#include "layers/replay.h"

using namespace tandem;

namespace {

bool all_hold = true;
MetricsFile* lines = nullptr;

void row(const std::string& what, double value, double bound, const char* unit) {
  const bool holds = value <= bound;
  all_hold &= holds;
  std::printf("%-64s %12.4g  ≤ %10.4g %s %s\n", what.c_str(), value, bound, unit, holds ? "" : "  FAILED");
  std::fflush(stdout);
  lines->write({{"check", what}, {"value", value}, {"bound", bound}, {"holds", std::int64_t(holds)}});
}

// ---- ops -------------------------------------------------------------------------------------------------------------
std::vector<double> numbers(std::uint64_t seed, std::int64_t n, DType as) {
  std::vector<double> v(static_cast<std::size_t>(n));
  Philox random(seed, Stream::test);
  for (std::int64_t i = 0; i < n; i++) {
    const float x = 2 * uniform(random.word(std::uint32_t(i))) - 1;
    v[std::size_t(i)] = as == DType::bf16 ? float(bf16(x)) : as == DType::f16 ? float(f16(x)) : x;
  }
  return v;
}
std::vector<double> absolute(std::vector<double> v) {
  for (double& x : v) x = std::abs(x);
  return v;
}
// The unit roundoff of what sums are stored in, and of the sums themselves.
double epsilon(DType t) { return t == DType::f32 ? 0x1p-23 : t == DType::f16 ? 0x1p-10 : 0x1p-7; }

// The largest |got − want| / (4·ε·√K·sizes): at most 1.
double worst(const std::vector<double>& got, const std::vector<double>& want, const std::vector<double>& sizes, double k,
             DType type) {
  double w = 0;
  for (std::size_t i = 0; i < got.size(); i++) {
    const double bound = 4 * epsilon(type) * std::sqrt(k) * sizes[i] + 1e-30, error = std::abs(got[i] - want[i]) / bound;
    w = error <= w ? w : error;  // a NaN wins
    if (!(error <= 1e300)) return INFINITY;
  }
  return w;
}

void convolutions(Backend& gpu, Backend& host, DType type) {
  const ConvShape shapes[] = {
      {.n = 2, .h = 14, .w = 14, .c_in = 3, .c_out = 16, .kh = 3, .kw = 3, .pad_h = 1, .pad_w = 1},
      {.n = 3, .h = 13, .w = 15, .c_in = 16, .c_out = 32, .kh = 3, .kw = 3, .pad_h = 1, .pad_w = 1},
      {.n = 2, .h = 8, .w = 8, .c_in = 64, .c_out = 64, .kh = 3, .kw = 3, .pad_h = 1, .pad_w = 1},
      {.n = 2, .h = 16, .w = 16, .c_in = 16, .c_out = 32, .kh = 3, .kw = 3, .stride_h = 2, .stride_w = 2, .pad_h = 1, .pad_w = 1},
      {.n = 2, .h = 8, .w = 8, .c_in = 64, .c_out = 32, .stride_h = 2, .stride_w = 2},
      {.n = 1, .h = 32, .w = 32, .c_in = 3, .c_out = 8, .kh = 7, .kw = 7, .stride_h = 2, .stride_w = 2, .pad_h = 3, .pad_w = 3},
      {.n = 2, .h = 9, .w = 9, .c_in = 8, .c_out = 8, .kh = 3, .kw = 3, .pad_h = 2, .pad_w = 2, .dilation_h = 2, .dilation_w = 2},
      {.n = 2, .h = 9, .w = 9, .c_in = 8, .c_out = 16, .kh = 3, .kw = 3, .pad_h = 1, .pad_w = 1, .groups = 4},
      {.n = 2, .h = 31, .w = 31, .c_in = 3, .c_out = 24, .kh = 2, .kw = 2},
      {.n = 1, .h = 6, .w = 5, .c_in = 5, .c_out = 7, .kh = 5, .kw = 3, .pad_h = 2, .pad_w = 1},
  };
  for (const ConvShape& s : shapes) {
    const Shape in{s.n, s.h, s.w, s.c_in}, out{s.n, s.out_h(), s.out_w(), s.c_out}, filter{s.c_out, s.kh, s.kw, s.c_in / s.groups};
    const auto x = numbers(1, in.elements(), type), w = numbers(2, filter.elements(), type), dy = numbers(3, out.elements(), type);
    auto on_host = [&](const std::vector<double>& v, const Shape& shape) { return Tensor::of(host, shape, v, DType::f64); };
    // Result and size of each pass on the host, in double.
    auto pass = [&](int which, const std::vector<double>& a, const std::vector<double>& b) {
      Tensor y(host, which == 0 ? out : which == 1 ? in : filter, DType::f64);
      if (which == 0) host.conv2d(s, on_host(a, in), on_host(b, filter), nullptr, false, y);
      if (which == 1) host.conv2d_backward_data(s, on_host(a, out), on_host(b, filter), y, false);
      if (which == 2) host.conv2d_backward_filter(s, on_host(a, in), on_host(b, out), y, false);
      return y.values();
    };
    auto on_gpu = [&](int which) {
      const Tensor gx = Tensor::of(gpu, in, x, type), gw = Tensor::of(gpu, filter, w), gd = Tensor::of(gpu, out, dy, type);
      Tensor y(gpu, which == 0 ? out : which == 1 ? in : filter, which == 2 ? DType::f32 : type);
      if (which == 0) gpu.conv2d(s, gx, gw, nullptr, false, y);
      if (which == 1) gpu.conv2d_backward_data(s, gd, gw, y, false);
      if (which == 2) gpu.conv2d_backward_filter(s, gx, gd, y, false);
      return y.values();
    };
    const double deep = double(s.kh * s.kw * s.c_in / s.groups), wide = double(s.kh * s.kw * s.c_out / s.groups),
                 long_ = double(s.n * s.out_h() * s.out_w());
    const std::vector<double>* a[] = {&x, &dy, &x};
    const std::vector<double>* b[] = {&w, &w, &dy};
    const double k[] = {deep, wide, long_};
    const char* names[] = {"forward", "data", "filter"};
    for (int which = 0; which < 3; which++) {
      char what[128];
      std::snprintf(what, sizeof what, "conv2d %s %s %lldx%lldx%lldx%lld → %lld, %lldx%lld/%lld", names[which], name_of(type),
                    (long long)s.n, (long long)s.h, (long long)s.w, (long long)s.c_in, (long long)s.c_out, (long long)s.kh,
                    (long long)s.kw, (long long)s.stride_h);
      const auto got = on_gpu(which);
      row(what, worst(got, pass(which, *a[which], *b[which]), pass(which, absolute(*a[which]), absolute(*b[which])), k[which], type),
          1, "of the bound");
      if (got != on_gpu(which)) row(std::string(what) + ": the same bits", 1, 0, "differences");
    }
  }
}

void products(Backend& gpu, Backend& host, DType type) {
  for (auto [m, n, k] : {std::tuple<std::int64_t, std::int64_t, std::int64_t>{5, 7, 3}, {128, 10, 256}, {130, 257, 512}})
    for (bool ta : {false, true})
      for (bool tb : {false, true}) {
        const Shape sa = ta ? Shape{k, m} : Shape{m, k}, sb = tb ? Shape{n, k} : Shape{k, n};
        const auto a = numbers(4, m * k, type), b = numbers(5, n * k, type);
        auto on_host = [&](const std::vector<double>& p, const std::vector<double>& q) {
          Tensor c(host, {m, n}, DType::f64);
          host.gemm(ta, tb, Tensor::of(host, sa, p, DType::f64), Tensor::of(host, sb, q, DType::f64), c, false);
          return c.values();
        };
        Tensor c(gpu, {m, n}, type);
        gpu.gemm(ta, tb, Tensor::of(gpu, sa, a, type), Tensor::of(gpu, sb, b, type), c, false);
        char what[96];
        std::snprintf(what, sizeof what, "gemm %s %s%s [%lld, %lld]·[%lld, %lld]", name_of(type), ta ? "T" : "N", tb ? "T" : "N",
                      (long long)m, (long long)k, (long long)k, (long long)n);
        row(what, worst(c.values(), on_host(a, b), on_host(absolute(a), absolute(b)), double(k), type), 1, "of the bound");
      }
}

void ops() {
  auto gpu = cuda_backend(0), host = reference_backend(0);
  gpu->deterministic(true);
  gpu->exact_convolution(true);
  host->exact_convolution(true);
  for (DType type : {DType::f32, DType::bf16, DType::f16}) {
    convolutions(*gpu, *host, type);
    products(*gpu, *host, type);
  }
}

// ---- train -----------------------------------------------------------------------------------------------------------
std::vector<double> losses(Backend& backend, const std::string& name, int steps, std::uint64_t shuffle) {
  const Dataset data = synthetic({.side = 32, .channels = 3, .train = 4096, .test = 16});
  Loader loader(data.train, {.batch = 64, .augment = {.pad_crop = 4, .flip = true}, .drop_last = true, .seed = shuffle, .prefetch = 0},
                backend);
  auto model = make_model(name, 10, 3, 32);
  ParameterSpace space(*model, backend, 1);
  SGD sgd({.learning_rate = 0.02, .momentum = 0.9});
  sgd.bind(space, 1);
  Batch batch;
  Tensor last(backend, Shape{});
  Replay step(
      backend,
      [&] {
        Variable l = cross_entropy((*model)(Variable(batch.images)), batch.labels);
        space.zero_gradients();
        space.backward(l);
        sgd.step(&l.value());
        last.copy_from(l.value());
      },
      "");
  std::vector<double> all;
  for (int epoch = 0; int(all.size()) < steps; epoch++) {
    sgd.epoch(std::uint32_t(epoch));
    loader.start(epoch);
    while (int(all.size()) < steps && loader.next(batch)) {
      sgd.stage();
      step(batch, false);
      space.count_writes(space.all());
      all.push_back(last.item());
    }
  }
  return all;
}
double mean_of(const std::vector<double>& v, std::size_t from) {
  double s = 0;
  for (std::size_t i = from; i < v.size(); i++) s += v[i];
  return s / double(v.size() - from);
}

void train() {
  auto gpu = cuda_backend(0), host = cpu_backend(0);
  for (Backend* b : {gpu.get(), host.get()}) b->deterministic(true), b->exact_convolution(true);
  for (const char* name : {"lenet5", "smallcnn_bn", "resnet20"}) {
    const auto g = losses(*gpu, name, 200, 1), h = losses(*host, name, 200, 1);
    double difference = 0;
    for (int i = 0; i < 20; i++) difference = std::max(difference, std::abs(g[std::size_t(i)] - h[std::size_t(i)]));
    row(std::string(name) + " f32: losses of steps 1–20, GPU against host", difference, 1e-4, "");
    // Other shuffles of the same data, on the host, for the spread of the mean over the last 50 steps.
    double low = mean_of(h, 150), high = low;
    for (std::uint64_t seed : {2, 3, 4}) {
      const double m = mean_of(losses(*host, name, 200, seed), 150);
      low = std::min(low, m), high = std::max(high, m);
    }
    const double at = mean_of(g, 150), beyond = std::max({0.0, low - at, at - high});
    row(std::string(name) + " f32: steps 151–200 beyond the host's own spread", beyond, 0.25 * (high - low), "");
  }
}

// ---- bench -----------------------------------------------------------------------------------------------------------
double seconds_of(Backend& backend, int times, const std::function<void()>& f) {
  for (int i = 0; i < 5; i++) f();
  std::vector<double> all;
  for (int repeat = 0; repeat < 7; repeat++) {
    backend.synchronize();
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < times; i++) f();
    backend.synchronize();
    all.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / times);
  }
  std::nth_element(all.begin(), all.begin() + 3, all.end());
  return all[3];
}

void measured(const std::string& what, double value, const char* unit) {
  std::printf("%-48s %10.3f %s\n", what.c_str(), value, unit);
  std::fflush(stdout);
  lines->write({{"bench", what}, {"value", value}, {"unit", std::string(unit)}});
}

void bench() {
  auto gpu = cuda_backend(0);
  {
    const std::int64_t n = 8192;
    Tensor a = Tensor::full(*gpu, {n, n}, 0.5, DType::bf16), b = Tensor::full(*gpu, {n, n}, 0.5, DType::bf16), c = Tensor::like(a);
    const double t = seconds_of(*gpu, 5, [&] { gpu->gemm(false, true, a, b, c, false); });
    measured("ceiling: matrix product bf16 8192³", 2 * std::pow(double(n), 3) / t / 1e12, "TFLOP/s");
    Tensor x = Tensor::zeros(*gpu, {std::int64_t{1} << 28}), y = Tensor::like(x);
    measured("ceiling: copy of 1 GiB, read and written", 2 * double(x.bytes()) / seconds_of(*gpu, 5, [&] { y.copy_from(x); }) / 1e9, "GB/s");
  }
  struct Case {
    const char* model;
    int side, channels, classes;
    std::int64_t batch;
  };
  for (const Case& c : {Case{"lenet5", 28, 1, 10, 128}, {"smallcnn", 28, 1, 10, 128}, {"resnet20", 32, 3, 10, 128},
                        {"resnet18", 32, 3, 10, 512}, {"resnet50", 224, 3, 1000, 256}}) {
    auto model = make_model(c.model, c.classes, c.channels, c.side);
    ParameterSpace space(*model, *gpu, 1);
    SGD sgd({.learning_rate = 1e-3, .momentum = 0.9});
    sgd.bind(space, 1);
    Batch batch;
    batch.images = Tensor::full(*gpu, {c.batch, c.side, c.side, c.channels}, 0.1, DType::bf16);
    batch.labels = batch.samples = Tensor::zeros(*gpu, {c.batch}, DType::i32);
    Replay step(
        *gpu,
        [&] {
          Variable l = cross_entropy((*model)(Variable(batch.images)), batch.labels);
          space.zero_gradients();
          space.backward(l);
          sgd.step(&l.value());
        },
        "");
    const double t = seconds_of(*gpu, c.side > 100 ? 5 : 50, [&] {
      sgd.stage();
      step(batch, false);
    });
    measured(std::string(c.model) + " bf16 batch " + std::to_string(c.batch), 1e3 * t, "ms");
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int status = run_program(argc, argv, [&] {
    const std::string stage = argc > 1 ? argv[1] : "";
    if (stage != "ops" && stage != "train" && stage != "bench") refuse("usage: bench_gpu ops|train|bench [JSONL]");
    const std::string device = cuda_backend(0)->description();
    MetricsFile file(argc > 2 ? argv[2] : "", true);
    lines = &file;
    std::printf("%s\n", device.c_str());
    lines->write({{"stage", stage}, {"device", device}});
    if (stage == "ops") ops();
    if (stage == "train") train();
    if (stage == "bench") bench();
  });
  return status ? status : all_hold ? 0 : 1;
}
