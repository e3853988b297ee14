// Trains any model on any data set: one of those known by name, a folder of pictures, or NumPy arrays.
#include <cstdio>

#include "tandem.h"

using namespace tandem;

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    RunConfig o = parse_options(
        argc, argv, "Trains a network on a data set.",
        {.data_set = "fashion-mnist", .model = "smallcnn", .epochs = 8, .chooses_batch = true, .learning_rate = 0.1});
    auto backend = make_backend(o);
    Dataset data = load_dataset(o.data_set, o.data, o.folder);
    std::printf("%s: %ld + %ld pictures, %d × %d, %s, %d classes\n", data.name.c_str(), data.train.count(),
                data.test.count(), data.side(), data.side(), counted(data.channels(), "channel").c_str(),
                data.classes());
    choose_batch(o, data, *backend);
    Loaders loaders(data, o, *backend);

    auto model = make_model(o.model, data.classes(), data.channels(), data.side());
    auto optimizer = make_optimizer(o);
    FitReport report = fit(model, cross_entropy_loss(o.label_smoothing), *optimizer, *backend, loaders, o);
    if (!report.epochs.empty()) std::printf("test accuracy %.2f %%\n", 100 * *report.epochs.back().test_accuracy);
  });
}
