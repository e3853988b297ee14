// Training on the device beside the host: the same seed and data.
#include <algorithm>
#include <cmath>
#include <span>

#include "datasets/synthetic.h"
#include "tests/gpu/table.h"
#include "tests/recorded_training.h"

namespace tandem::gpu {
namespace {

using Values = std::vector<double>;

// The losses of so many steps. `shuffle` is the seed of the order and the crops; the initial weights are always the
// same.
Values losses(Backend& backend, const Case& c, int steps, std::uint64_t shuffle) {
  backend.deterministic(true);
  backend.exact_convolution(true);
  const Dataset data = synthetic({.side = c.side, .channels = c.channels, .train = 2048, .test = 16});
  const LoaderOptions options{
      .batch = c.batch, .augment = {.pad_crop = 4, .flip = true}, .drop_last = true, .seed = shuffle, .prefetch = 0};
  Loader loader(data.train, options, backend);
  return test::RecordedTraining(backend, c.make(), 0.02).steps(steps, loader);
}

// The mean of the `window` values before each multiple of it.
Values smoothed(const Values& v, int window) {
  Values means;
  for (std::size_t end = std::size_t(window); end <= v.size(); end += std::size_t(window)) {
    double sum = 0;
    for (std::size_t i = end - std::size_t(window); i < end; i++) sum += v[i];
    means.push_back(sum / window);
  }
  return means;
}

}  // namespace

void check_training(const Machine& machine, Table& table) {
  const int steps = machine.small ? 40 : 200, window = steps / 4;
  const Case cases[] = {
      {"lenet5", 28, 1, 10, machine.small ? 8 : 64}, {"smallcnn-bn", 28, 1, 10, 32}, {"resnet20", 28, 1, 10, 16}};
  for (const Case& c : std::span(cases, machine.small ? 1 : 3)) {
    const std::string what = c.text(DType::f32);
    if (!table.time_for(what)) continue;
    auto device = machine.device(), again = machine.device(), host = machine.host();
    const Values got = losses(*device, c, steps, 1), want = losses(*host, c, steps, 1);
    // Two correct backends drift apart, too, and deep networks fast: twice as far as the reference backend from the
    // host is allowed.
    auto apart = [](const Values& a, const Values& b) {
      double most = 0;
      for (std::size_t i = 0; i < 20; i++) most = std::max(most, std::abs(a[i] - b[i]));
      return most;
    };
    auto reference = reference_backend(0);
    table.check(what + ": losses of steps 1–20, device − host", apart(got, want),
                std::max(1e-4, 2 * apart(losses(*reference, c, 20, 1), want)));
    const Values twice = losses(*again, c, steps, 1);
    table.check(what + ": losses that differ in a second run, deterministic", double(got != twice), 0);

    // The host's own spread: the same weights, other orders and crops. A quarter of its width beyond it is allowed: of
    // five equal runs one is the lowest and one the highest. How many means lie inside stands in a line of its own.
    if (!table.time_for(what + ": the host's spread")) continue;
    Values low = smoothed(want, window), high = low;
    for (std::uint64_t shuffle : {2, 3, 4}) {
      const Values other = smoothed(losses(*host, c, steps, shuffle), window);
      for (std::size_t i = 0; i < low.size(); i++)
        low[i] = std::min(low[i], other[i]), high[i] = std::max(high[i], other[i]);
    }
    const Values at = smoothed(got, window);
    double beyond = 0;
    int inside = 0;
    for (std::size_t i = 0; i < at.size(); i++) {
      const double out = std::max(low[i] - at[i], at[i] - high[i]);
      inside += out <= 0;
      beyond = std::max(beyond, out / std::max(1e-9, high[i] - low[i]));
    }
    const std::string means = what + ": " + std::to_string(steps) + " steps, means of " + std::to_string(window);
    table.measured(means + ", inside the host's spread", inside,
                   ("of " + std::to_string(at.size()) + ", not compared").c_str());
    table.check(means + ", beyond it (a quarter is allowed)", beyond, 0.25, "of its width");
  }
}

}  // namespace tandem::gpu
