// The training step of a network that ends in many classes, as the ranks were started: for every batch a line
//   BATCH STEP MOVED MEMORY
// STEP: milliseconds, the median of blocks of at least a second. MOVED: MB that one rank sent in a step. MEMORY: MB of
// a rank, where what ranks share counts once for all of them.
//   tandem-run -n 4 --strategy hybrid bench_hybrid CLASSES FEATURES BATCH …       (batches over all ranks)
#include <cstdio>
#include <map>

#include "core/random.h"
#include "layers/layers.h"
#include "layers/train/options.h"
#include "layers/train/strategy.h"
#include "tests/bench/timing.h"

using namespace tandem;

namespace {

struct Net : Module {
  Linear &body, &classes;
  Net(std::int64_t features, std::int64_t outputs)
      : body(child<Linear>("body", features, features, true, true)),
        classes(child<Linear>("classes", features, outputs)) {}
  Variable forward(const Variable& x) override { return classes(body(x)); }
};

struct StepLoop {
  Net model;
  Task task = classification();
  FlatParameters flat;
  SGD sgd{{.learning_rate = 1e-3, .momentum = 0.9}};
  Variable x;
  Tensor labels;

  StepLoop(Strategy& strategy, Backend& backend, std::int64_t classes, std::int64_t features, std::int64_t rows)
      : model(features, classes), flat((strategy.prepare(model, task, {}), model), backend, 1, strategy.memory()) {
    Philox random(3, Stream::test, 0, std::uint32_t(strategy.rank()));
    std::vector<double> values(std::size_t(rows * features)), y(static_cast<std::size_t>(rows));
    for (std::size_t i = 0; i < values.size(); i++) values[i] = 2 * uniform(random.word(std::uint32_t(i))) - 1;
    for (std::size_t i = 0; i < y.size(); i++)
      y[i] = double(random.word(std::uint32_t(values.size() + i)) % std::uint32_t(classes));
    x = Variable(Tensor::of(backend, {rows, features}, values));
    labels = Tensor::of(backend, {rows}, y, DType::i32);
    sgd.bind(flat);
    strategy.begin(flat, sgd);
  }
  void step(Strategy& strategy) {
    const Variable loss = task.loss(model(x), labels, nullptr);
    flat.zero_gradients();
    flat.backward(loss, 1.0 / strategy.size());
    strategy.step(sgd, loss);
  }
};

}  // namespace

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    if (argc < 4) refuse("usage: bench_hybrid CLASSES FEATURES BATCH …");
    auto backend = cpu_backend(0);
    for (int a = 3; a < argc; a++) {
      auto strategy = strategy_from_environment();
      StepLoop training(*strategy, *backend, std::atoll(argv[1]), std::atoll(argv[2]),
                        std::atoll(argv[a]) / strategy->size());
      auto seconds = [&](int steps) {
        strategy->sum({});  // all ranks begin together
        return seconds_of([&] { training.step(*strategy); }, steps);
      };
      seconds(1);
      const double slowest = strategy->sum({.loss = seconds(1)}).loss / strategy->size();
      const int steps = std::max(1, int(1 / slowest));
      std::vector<double> blocks;
      for (int b = 0; b < 7; b++) blocks.push_back(seconds(steps));
      const double memory = strategy->sum({.loss = double(of_this_process("Pss:", "/proc/self/smaps_rollup"))}).loss /
                            1e6 / strategy->size();
      const Measures all = strategy->end();
      // Rank 0 has also sent the first weights.
      const double first =
          double(training.flat.all(OwnerClass::replicated).length()) * sizeof(float) * (strategy->size() - 1);
      const double sent = std::map<std::string, double>(all.begin(), all.end())["sent_bytes"] - first;
      if (strategy->rank() == 0)
        std::printf("%s %.1f %.2f %.0f\n", argv[a], 1e3 * median(blocks), sent / 1e6 / (2 + 7 * steps), memory);
    }
    return 0;
  });
}
