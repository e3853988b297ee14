// What the simulator costs beside loading, forward and backward passes: update rules, clock, copies and bookkeeping.
// ResNet-20 on pictures like CIFAR-10, augmented, batch 128, 32 workers, one thread, no evaluation.
//   bench_simulator [pushes of each run, default 200] [JSONL file]
#include <cstdio>
#include <string>

#include "core/clock.h"
#include "core/text.h"
#include "datasets/synthetic.h"
#include "dist/lab/simulator.h"
#include "tandem.h"

using namespace tandem;

namespace {

struct Measured {
  double seconds = 0, computing = 0;
  double overhead() const { return 1 - computing / seconds; }
};

Measured measure(const std::string& rule, DType dtype, std::int64_t pushes) {
  constexpr std::int64_t batch = 128;
  auto backend = cpu_backend(1);
  Dataset data = synthetic({.side = 32, .channels = 3, .train = batch * pushes, .test = 128});
  Loader train(data.train, {.batch = batch, .dtype = dtype, .augment = Augment::usual(32), .prefetch = 0}, *backend);
  auto model = make_model("resnet20", data.classes(), data.channels(), data.side());
  SimulatorOptions o{.strategy = rule, .progress = false};
  o.cluster.workers = 32;
  const auto began = Clock::now();
  const SimulatorReport r =
      simulate(model, cross_entropy_loss(), {.learning_rate = 0.01, .momentum = 0.9, .weight_decay = 5e-4}, *backend,
               {train, nullptr, nullptr}, o);
  return {seconds_since(began), r.computing};
}

}  // namespace

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    const std::int64_t pushes = argc > 1 ? parsed<std::int64_t>(argv[1]).value_or(0) : 200;
    if (pushes < 1) refuse("bench_simulator ", argv[1], ": expected how many pushes a run is to make");
    constexpr double steps = 30 * 391;  // 30 epochs of 50,000 pictures
    std::string lines;
    for (const DType dtype : {DType::bf16, DType::f32})
      for (const char* rule : {"asgd", "asgd-m", "dc-asgd-a", "dana-dc", "ddc-asgd"}) {
        const Measured m = measure(rule, dtype, pushes);
        const double step = m.seconds / double(pushes), runs = 3600 / (step * steps);
        std::printf(
            "%-4s %-10s %7.2f ms a push, of which overhead %5.2f ms, %4.1f %%; %.2f runs of 30 epochs an hour\n",
            name_of(dtype), rule, step * 1e3, step * 1e3 * m.overhead(), 100 * m.overhead(), runs);
        lines += printed(R"({"bench":"simulator/%s/%s","ours":%.4g,"overhead":%.3g,"unit":"ms"})", name_of(dtype), rule,
                         step * 1e3, m.overhead()) +
                 "\n";
      }
    if (argc > 2) write_file(argv[2], lines);
  });
}
