// Two layers as a module of your own. A module (names, initial values), an optimizer (the update) and fit() (the loop)
// do what perceptron.cpp did by hand. The next step is lenet.cpp.
#include <cstdio>

#include "tandem.h"

using namespace tandem;

class Mlp : public Module {
 public:
  Mlp(std::int64_t inputs, std::int64_t classes)
      : hidden_(child<Linear>("hidden", inputs, 128)), out_(child<Linear>("out", 128, classes)) {}
  // Without the ReLU two layers would equal one layer: a product of matrices is a matrix.
  Variable forward(const Variable& x) override { return out_(relu(hidden_(flatten(x)))); }

 private:
  Linear &hidden_, &out_;  // owned by this module's tree, where the optimizer finds their parameters
};

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    RunConfig o = parse_options(argc, argv, "A module of two layers.", {.epochs = 3, .learning_rate = 0.1},
                                {"--data", "--epochs", "--batch", "--lr", "--seed", "--device", "--metrics"});
    auto backend = make_backend(o);
    Dataset data = load_dataset("fashion-mnist", o.data);
    Loader train(data.train, {.batch = o.batch, .seed = o.seed}, *backend);
    Loader test(data.test, {.batch = 500, .shuffle = false}, *backend);

    Mlp model(data.train.height() * data.train.width(), data.train.classes);
    SGD sgd({.learning_rate = o.learning_rate, .momentum = 0.9});
    FitReport report = fit(model, cross_entropy_loss(), sgd, *backend, {train, nullptr, &test}, o);
    for (auto& [name, parameter] : model.parameters())
      std::printf("%-14s %ld values\n", name.c_str(), parameter->shape.numel());
    if (!report.epochs.empty()) std::printf("test accuracy %.2f %%\n", 100 * *report.epochs.back().test_accuracy);
  });
}
