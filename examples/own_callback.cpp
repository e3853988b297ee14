// A callback of your own: it ends the training at a given test accuracy, and prints the time that the training took.
#include <cstdio>

#include "layers/train/run.h"
#include "tandem.h"

using namespace tandem;

struct StopAt : Callback {
  double target, seconds = 0;
  explicit StopAt(double target) : target(target) {}
  void epoch_end(Run& run) override {
    seconds += run.epoch.seconds;
    if (run.epoch.test_accuracy < target) return;  // also if this rank does not evaluate
    std::printf("%.1f %% after %s, %.1f s\n", 100 * target, counted(run.epoch.epoch, "epoch").c_str(), seconds);
    run.stop("the accuracy is reached");
  }
};

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    RunConfig o = parse_options(argc, argv, "LeNet-5 until it knows 88 % of the test pictures.",
                                {.model = "lenet5", .epochs = 20, .learning_rate = 0.05},
                                {"--data", "--model", "--epochs", "--batch", "--lr", "--seed", "--metrics"});
    auto backend = make_backend(o);
    Dataset data = load_dataset("fashion-mnist", o.data);
    Loader train(data.train, {.batch = o.batch, .seed = o.seed}, *backend);
    Loader test(data.test, {.batch = 500, .shuffle = false}, *backend);
    auto model = make_model(o.model, data.train.classes, 1, 28);
    SGD sgd({.learning_rate = o.learning_rate, .momentum = 0.9});
    o.callbacks = {std::make_shared<StopAt>(0.88)};
    fit(*model, cross_entropy_loss(), sgd, *backend, {train, nullptr, &test}, o);
  });
}
