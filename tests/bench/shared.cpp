// Training with the default threads, driven over stdin and stdout as peer.py is: one program of shared.py, which starts
// several at once to see what they leave of each other's speed.
//
//   build/bench_shared MODEL     answers "ready"; then, for each line "for SECONDS", "images/s RATE" over that time
#include <cstdio>
#include <iostream>

#include "core/clock.h"
#include "datasets/loader.h"
#include "layers/models/models.h"
#include "layers/optim/optimizer.h"
#include "layers/train/options.h"

using namespace tandem;

namespace {

void run(const std::string& name) {
  auto backend = cpu_backend();
  Dataset data = load_dataset(name.starts_with("resnet") ? "cifar-10" : "fashion-mnist", "synthetic");
  Loader train(data.train, {.batch = 128}, *backend);
  auto model = make_model(name, data.classes(), data.channels(), data.side());
  FlatParameters flat(*model, *backend, 1);
  SGD sgd({.learning_rate = 1e-3, .momentum = 0.9});
  sgd.bind(flat);
  std::int64_t epoch = 0, pictures = 0;
  Batch batch;
  auto step = [&] {
    while (!train.next(batch)) train.start(epoch++);
    Variable loss = cross_entropy((*model)(Variable(batch.images)), batch.labels);
    flat.zero_gradients();
    flat.backward(loss);
    sgd.step(&loss.value());
    pictures += batch.size();
  };
  train.start(epoch++);
  for (int i = 0; i < 20; i++) step();
  std::puts("ready");
  std::fflush(stdout);
  double seconds;
  for (std::string word; std::cin >> word >> seconds;) {
    const auto begin = Clock::now();
    for (pictures = 0; seconds_since(begin) < seconds;) step();
    std::printf("images/s %.0f\n", double(pictures) / seconds_since(begin));
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    std::vector<std::string> models;
    parse_command_line(argc, argv, "bench_shared MODEL: reads \"for SECONDS\" from stdin", {}, &models);
    if (models.size() != 1) refuse("which model? bench_shared MODEL");
    run(models[0]);
  });
}
