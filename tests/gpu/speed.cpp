// How fast: the card's ceilings, kernels beside them, and training steps. tests/gpu/peer.py has PyTorch's.
#include <cmath>

#include "layers/export/summary.h"
#include "layers/optim/optimizer.h"
#include "layers/train/step_graph.h"
#include "tests/bench/timing.h"
#include "tests/gpu/table.h"

namespace tandem::gpu {
namespace {

// Seconds of one call: the median of seven rounds of `times` calls, behind five for warmth.
double seconds_of_call(Backend& backend, int times, const std::function<void()>& f) {
  for (int i = 0; i < 5; i++) f();
  std::vector<double> all;
  for (int round = 0; round < 7; round++) {
    backend.synchronize();
    all.push_back(seconds_of([&] {
      for (int i = 0; i < times; i++) f();
      backend.synchronize();
    }));
  }
  return median(all) / times;
}

}  // namespace

void measure_speed(const Machine& machine, Table& table) {
  auto device = machine.device();
  Backend& gpu = *device;
  const DType type = gpu.supports(DType::bf16) ? DType::bf16 : DType::f32;
  const int few = machine.small ? 1 : 5, many = machine.small ? 1 : 50;

  // ---- what the card can do -----------------------------------------------------------------------------------------
  const std::int64_t n = machine.small ? 256 : 8192, floats = std::int64_t{1} << (machine.small ? 18 : 28);
  const std::string bits = std::string(" ") + name_of(type);
  double products = 0, copies = 0;
  {
    Tensor a = Tensor::full(gpu, {n, n}, 0.5, type), b = Tensor::full(gpu, {n, n}, 0.5, type), c = Tensor::like(a);
    products = 2 * std::pow(double(n), 3) / seconds_of_call(gpu, few, [&] { gpu.gemm(false, true, a, b, c, false); });
    table.measured("ceiling: matrix product" + bits + " " + std::to_string(n) + "³", products / 1e12, "TFLOP/s");
    Tensor x = Tensor::zeros(gpu, {floats}), y = Tensor::like(x);
    copies = 2 * double(x.bytes()) / seconds_of_call(gpu, few, [&] { y.copy_from(x); });
    table.measured("ceiling: a copy, read and written", copies / 1e9, "GB/s");
  }

  // ---- kernels of our own, by the bytes that they must at least touch -----------------------------------------------
  const std::int64_t rows = machine.small ? 1024 : 512 * 1024, channels = 64;
  auto moved = [&](const std::string& what, double bytes, const std::function<void()>& f) {
    if (!table.time_for(what)) return;
    const double rate = bytes / seconds_of_call(gpu, many, f);
    table.measured(what, rate / 1e9, "GB/s", rate / copies, "the copy");
  };
  {
    Tensor x = Tensor::full(gpu, {rows, channels}, 0.5, type), y = Tensor::like(x), dx = Tensor::like(x);
    auto vector = [&](double v) { return Tensor::full(gpu, {channels}, v); };
    Tensor gamma = vector(1), beta = vector(0), mean = vector(0), variance = vector(1), saved = vector(0),
           inverse = vector(1), dgamma = vector(0), dbeta = vector(0);
    const NormShape s{.rows = rows, .channels = channels, .relu = true};
    const double bytes = double(x.bytes());
    moved("batch norm + ReLU" + bits + " [" + std::to_string(rows) + ", 64], forward", 3 * bytes,
          [&] { gpu.batch_norm(s, x, nullptr, gamma, beta, mean, variance, y, saved, inverse); });
    moved("the same, backward", 5 * bytes, [&] {
      gpu.batch_norm_backward(s, x, nullptr, y, gamma, beta, saved, inverse,
                              {.dx = &dx, .dgamma = &dgamma, .dbeta = &dbeta});
    });
  }
  for (const char* name : {"sgd", "lars"}) {
    auto model = make_model(machine.small ? "lenet5" : "resnet18", 10, machine.small ? 1 : 3, machine.small ? 28 : 32);
    FlatParameters flat(*model, gpu, 1);
    flat.gradients.fill(1e-6);
    std::unique_ptr<Optimizer> optimizer;
    if (std::string(name) == "sgd")
      optimizer = std::make_unique<SGD>(SGDOptions{.momentum = 0.9, .nesterov = true});
    else
      optimizer = std::make_unique<LARS>(LARSOptions{});
    optimizer->bind(flat, 1);
    // Gradients are read for their norm, and again with parameters and velocities, which are written; LARS reads
    // parameters twice.
    moved(std::string(name) + " of " + std::to_string(flat.parameters()) + " parameters, one update",
          double(flat.values.bytes()) * (std::string(name) == "sgd" ? 6 : 7), [&] {
            optimizer->measure(flat.all(), false);
            optimizer->check_gradients(nullptr);
            optimizer->apply(flat.all());
          });
  }

  // ---- training steps -----------------------------------------------------------------------------------------------
  for (const Case& c : {Case{"lenet5", 28, 1, 10, 128},
                        {"smallcnn", 28, 1, 10, 128},
                        {"resnet20", 32, 3, 10, 128},
                        {"resnet18", 32, 3, 10, 512},
                        {"vgg16", 32, 3, 10, 512},
                        {"resnet50", 224, 3, 1000, 256}}) {
    const std::string what = c.text(type);
    if (machine.small && c.side != 28) continue;
    if (!table.time_for(what)) continue;
    auto model = c.make();
    FlatParameters flat(*model, gpu, 1);
    SGD sgd({.learning_rate = 1e-3, .momentum = 0.9});
    sgd.bind(flat, 1);
    sgd.if_not_finite = IfNotFinite::wait;  // the step is recorded
    // A gradient costs what the forward pass does, for pictures and for filters; the first layer's pictures need none.
    const double flops = 6 * summary(*model, {2, c.side, c.side, c.channels}).macs * double(c.batch);
    Batch batch;
    batch.images = Tensor::full(gpu, {c.batch, c.side, c.side, c.channels}, 0.1, type);
    batch.labels = batch.samples = Tensor::zeros(gpu, {c.batch}, DType::i32);
    StepGraph step(gpu, false,
                   {.backward =
                        [&] {
                          Variable l = cross_entropy((*model)(Variable(batch.images)), batch.labels);
                          flat.zero_gradients();
                          flat.backward(l);
                          sgd.step(&l.value());
                        }},
                   "");
    const double t = seconds_of_call(gpu, c.side > 100 ? few : many, [&] {
      sgd.sync_hyperparameters();
      step(batch, false);
    });
    table.measured(what, 1e3 * t, "ms", flops / t / products, "the product");
  }
}

}  // namespace tandem::gpu
