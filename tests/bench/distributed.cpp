// The training step of several ranks, as they were started: for every model a line
//   MODEL BATCH COMPUTE STEP BYTES BUCKET EXPOSED
// COMPUTE: milliseconds of forward, backward and SGD with momentum while all ranks compute and nothing is exchanged;
// STEP: the same with the gradients exchanged; both medians over alternating blocks. BYTES of gradients, of one bucket;
// EXPOSED milliseconds of a step in which it only waited for the network. The peer (peers/step_ddp.py) does the same.
//   tandem-run -n 2 bench_distributed MODEL BATCH …
#include <cstdio>
#include <map>

#include "layers/train/options.h"
#include "tests/bench/pictures.h"
#include "tests/bench/timing.h"

using namespace tandem;

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    auto backend = cpu_backend(0);
    for (int a = 1; a + 1 < argc; a += 2) {
      const std::string name = argv[a];
      const std::int64_t batch = std::atoll(argv[a + 1]);
      Strategy nothing;
      auto strategy = strategy_from_environment();
      TimedModel alone(*backend, name, batch), shared(*backend, name, batch, DType::f32, strategy->memory());
      strategy->begin(shared.flat, shared.sgd);
      helpers_first();
      auto measured = [&] {
        const Measures all = strategy->end();
        strategy->begin(shared.flat, shared.sgd);
        return std::map<std::string, double>(all.begin(), all.end());
      };
      auto block = [&](TimedModel& t, Strategy& s, int steps) {
        strategy->sum({});  // all ranks begin together
        return milliseconds([&] { t.step(s); }, steps);
      };
      block(alone, nothing, 2);
      const double once = block(shared, *strategy, 3);
      // As many on all ranks: rank 0's clock decides.
      const int steps =
          int(strategy->sum({.loss = strategy->rank() == 0 ? std::clamp(300 / once, 1.0, 20.0) : 0}).loss);
      std::vector<double> compute, step;
      const double exposed = measured()["exposed_seconds"];
      for (int round = 0; round < 5; round++) {
        compute.push_back(block(alone, nothing, steps));
        step.push_back(block(shared, *strategy, steps));
      }
      auto after = measured();
      if (strategy->rank() == 0)
        std::printf("%s %lld %.4f %.4f %lld %lld %.4f\n", name.c_str(), static_cast<long long>(batch), median(compute),
                    median(step), static_cast<long long>(shared.flat.gradients.bytes()),
                    static_cast<long long>(after["bucket_bytes"]),
                    (after["exposed_seconds"] - exposed) * 1e3 / (5 * steps));
      strategy->end();
    }
  });
}
