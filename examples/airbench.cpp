// CIFAR-10 to 94 % in seconds: the recipe of airbench94 (airbench.h). The measured time includes the whitening, the
// training and the last test. Before that a device makes one short run, and the pictures are in its memory.
//
//   build/airbench --device cuda --dtype f16 --runs 20
//   build/airbench --data synthetic --val 49000 --batch 100 --epochs 2        a small run, on any CPU
#include "examples/airbench.h"

#include <cstdio>

#include "core/clock.h"
#include "core/text.h"
#include "layers/train/step_graph.h"
#include "tandem.h"

using namespace tandem;
using namespace tandem::airbench;

namespace {

struct Result {
  double accuracy = 0, seconds = 0;
};

// Trains new weights for at most `most` steps. prints: prints a line with a test accuracy for each epoch; the time of
// these tests is not counted.
Result attempt(const RunConfig& o, std::uint64_t seed, Backend& backend, const Pictures& pictures, const Looks& looks,
               std::int64_t most, bool prints) {
  Loader loader(pictures,
                {.batch = o.batch,
                 .dtype = o.dtype,
                 .augment = {.pad_crop = 2, .flip = true, .reflect = true, .alternate = true},
                 .drop_last = true,
                 .seed = seed},
                backend);
  Net model;
  FlatParameters flat(model, backend, seed);
  let_through(flat);
  Descent optimizer(o.learning_rate, o.momentum, o.weight_decay);
  if (o.dtype == DType::f16) optimizer.loss_scaling.emplace();
  optimizer.bind(flat, seed);
  optimizer.if_not_finite = IfNotFinite::wait;  // a recorded step cannot read the flag; pause() reads it
  const Loss loss = cross_entropy_loss(o.label_smoothing);
  Batch batch;
  auto backward = [&] {
    flat.zero_gradients();
    flat.backward(optimizer.scaled(loss(model(Variable(batch.images)), batch.labels, nullptr)));
    optimizer.step();
  };
  StepGraph step(backend, false, {.backward = backward}, "");
  Result run;
  auto begin = Clock::now();
  auto pause = [&](const std::string& where) {
    backend.synchronize();
    run.seconds += seconds_since(begin);
    if (optimizer.read_state().not_finite == 1) fail(where, ": the loss or its gradient is not finite");
  };
  const ParameterRange& whiten = flat.parameter_range("whiten.weight");
  whiten.leaf->value.copy_from(Tensor::of(backend, whiten.shape, whitening(pictures)));
  flat.count_writes(flat.all());
  Lookahead lookahead(flat);
  const auto total = std::int64_t(std::ceil(0.99 * double(o.epochs * loader.batches_per_epoch())));  // 9.9 of 10 epochs
  model.train();
  for (std::int64_t done = 0, epoch = 0; epoch < o.epochs && done < std::min(most, total); epoch++) {
    if (epoch == whitening_bias_epochs) optimizer.freeze(flat.parameter_range("whiten.bias"));
    optimizer.epoch(std::uint32_t(epoch));
    loader.start(epoch);
    while (done < std::min(most, total) && loader.next(batch)) {
      optimizer.learning_rate(o.learning_rate * triangle(double(done) / double(total)));
      optimizer.sync_hyperparameters();
      step(batch, false);
      if (backend.records()) flat.count_writes(flat.all());
      if (++done % 5 == 0) lookahead.pull(Lookahead::decay(double(done) / double(total)));
    }
    if (done == total) lookahead.pull(1);
    if (!prints) continue;
    pause("epoch " + std::to_string(epoch + 1));
    std::printf("epoch %ld  test accuracy %.2f %%  %.2f s of training\n", epoch + 1,
                100 * looks.accuracy(model, backend, 1), run.seconds);
    std::fflush(stdout);
    begin = Clock::now();
  }
  run.accuracy = looks.accuracy(model, backend);
  pause("seed " + std::to_string(seed));
  return run;
}

}  // namespace

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    int runs = 1;
    OptionRows own;
    own.number("--runs", runs, 1, 9999, "runs, with seeds that follow each other, and their mean");
    const RunConfig o =
        parse_options(argc, argv, "CIFAR-10 to 94 % in seconds (airbench94's recipe).",
                      {.epochs = 10,
                       .batch = 1024,
                       .learning_rate = learning_rate,
                       .momentum = momentum,
                       .weight_decay = weight_decay,
                       .label_smoothing = label_smoothing},
                      {"--data", "--epochs", "--batch", "--lr", "--momentum", "--weight-decay", "--label-smoothing",
                       "--seed", "--device", "--dtype", "--threads", "--val", "--tf32"},
                      own.all);
    auto backend = make_backend(o);
    const Dataset data = load_dataset("cifar-10", o.data);
    const Pictures training = split(data.train, o.val, o.seed).first;
    // 200 synthetic pictures are enough: evaluating 10,000 of them six times takes minutes on a CPU.
    const Pictures test = o.data == "synthetic" ? split(data.test, 200, o.seed).second : data.test;
    const Looks looks(test, {.batch = std::min<std::int64_t>(2000, test.count()), .dtype = o.dtype, .shuffle = false},
                      *backend);
    // A short run first, not measured: kernels are chosen and memory is allocated
    if (backend->on_device()) attempt(o, o.seed, *backend, training, looks, 8, false);
    double right = 0, squares = 0, seconds = 0;
    int reached = 0;
    for (int i = 0; i < runs; i++) {
      const Result run =
          attempt(o, o.seed + std::uint64_t(i), *backend, training, looks, std::int64_t{1} << 40, runs == 1);
      std::printf("run %d: test accuracy %.2f %%, %.3f s%s\n", i + 1, 100 * run.accuracy, run.seconds,
                  run.accuracy >= 0.94 ? "  (94 % is reached)" : "");
      std::fflush(stdout);
      right += run.accuracy;
      squares += run.accuracy * run.accuracy;
      seconds += run.seconds;
      reached += run.accuracy >= 0.94;
    }
    const double mean = right / runs;
    if (runs > 1)
      std::printf("mean of %d runs: test accuracy %.2f %% (standard deviation %.2f %%), %.3f s; %d reached 94 %%\n",
                  runs, 100 * mean, 100 * std::sqrt(std::max(0.0, squares / runs - mean * mean)), seconds / runs,
                  reached);
  });
}
