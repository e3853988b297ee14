// The steps of fit() as the ranks were started, on synthetic pictures, beside the same steps while nothing is
// exchanged. A line for every rank, milliseconds:
//   rank R: COMPUTE STEP EXCHANGE
// COMPUTE: a step of one machine, while every rank makes such steps by itself; STEP: one under the strategy; EXCHANGE:
// what of that lies between backward and the next batch. Medians, without the first steps.
//   tandem-run -n 2 --strategy asgd bench_fit MODEL BATCH STEPS
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "core/clock.h"
#include "datasets/loader.h"
#include "datasets/synthetic.h"
#include "layers/models/models.h"
#include "layers/train/options.h"
#include "layers/train/run.h"
#include "tests/bench/helpers_first.h"

using namespace tandem;

namespace {

constexpr int first = 5;  // steps that are not counted: memory is touched, and algorithms are chosen

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v.empty() ? 0 : v[v.size() / 2];
}

struct Times : Callback {
  int steps = 0;
  std::vector<double> step, exchange;  // milliseconds
  Clock::time_point step_began, exchange_began;
  void phase(Run&, const char* name, bool begins) override {
    if (name != std::string("exchange")) return;
    if (begins) exchange_began = Clock::now();
    if (!begins && steps > first) exchange.push_back(1e3 * seconds_since(exchange_began));
  }
  void step_end(Run&) override {
    if (steps++ > first) step.push_back(1e3 * seconds_since(step_began));
    step_began = Clock::now();
  }
};

}  // namespace

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    if (argc != 4) refuse("bench_fit MODEL BATCH STEPS");
    const std::string name = argv[1];
    const std::int64_t batch = std::atoll(argv[2]), steps = std::atoll(argv[3]);
    const bool gray = name == "smallcnn" || name == "lenet5" || name == "mlp";
    auto backend = cpu_backend(0);
    auto strategy = strategy_from_environment();
    helpers_first();
    const Dataset data =
        synthetic({.side = gray ? 28 : 32, .channels = gray ? 1 : 3, .train = int(20 * batch), .test = 10});
    const auto run = [&](Strategy& s, std::int64_t ends_after) {
      strategy->gather("");  // all begin together
      Loader train(data.train, {.batch = batch, .augment = Augment::usual(gray ? 28 : 32)}, *backend);
      auto model = make_model(name, 10, gray ? 1 : 3, gray ? 28 : 32);
      SGD sgd({.learning_rate = 1e-4, .momentum = 0.9, .weight_decay = 5e-4});
      auto times = std::make_shared<Times>();
      RunConfig options{.epochs = 1000, .progress = false, .stop_after = ends_after};
      options.callbacks = {times};
      fit(*model, cross_entropy_loss(), sgd, *backend, {train, nullptr, nullptr}, options, &s);
      return *times;
    };
    Strategy one;
    const std::vector<double> before = run(one, first + steps / 2).step;
    const Times times = run(*strategy, (first + steps) * strategy->size());
    std::vector<double> alone = run(one, first + steps / 2).step;
    alone.insert(alone.end(), before.begin(), before.end());
    std::printf("rank %d: %.3f %.3f %.3f\n", strategy->rank(), median(alone), median(times.step),
                median(times.exchange));
  });
}
