// Trains a residual network on CIFAR-10. The defaults are the recipe of examples/recipes/resnet20_cifar10.py.
#include <cstdio>

#include "tandem.h"

using namespace tandem;

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    RunConfig o = parse_options(argc, argv, "Trains a network on CIFAR-10.",
                                {.model = "resnet20", .epochs = 10, .learning_rate = 0.4, .augment = true});
    auto backend = make_backend(o);
    Dataset data = load_dataset("cifar-10", o.data);
    Loaders loaders(data, o, *backend);

    auto model = make_model(o.model, data.classes(), data.channels(), data.side());
    auto optimizer = make_optimizer(o);
    FitReport report = fit(model, cross_entropy_loss(o.label_smoothing), *optimizer, *backend, loaders, o);
    if (!report.epochs.empty()) std::printf("test accuracy %.2f %%\n", 100 * *report.epochs.back().test_accuracy);
  });
}
