// Trains a small network on Fashion-MNIST, on one machine or on several ranks. This is the whole program.
#include <cstdio>

#include "tandem.h"

using namespace tandem;

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    RunConfig o = parse_options(argc, argv, "Trains a network on Fashion-MNIST.",
                                {.model = "smallcnn", .epochs = 8, .learning_rate = 0.1});
    auto backend = make_backend(o);                        // --device
    Dataset data = load_dataset("fashion-mnist", o.data);  // --data, or $TANDEM_DATA
    Loaders loaders(data, o, *backend);                    // --batch, --augment, --val

    auto model = make_model(o.model, data.classes(), data.channels(), data.side());
    auto optimizer = make_optimizer(o);
    FitReport report = fit(model, cross_entropy_loss(o.label_smoothing), *optimizer, *backend, loaders, o);
    if (!report.epochs.empty()) std::printf("test accuracy %.2f %%\n", 100 * *report.epochs.back().test_accuracy);
  });
}
