// Trains any model on any data set: one of those known by name, a folder of pictures, or NumPy arrays.
#include <cstdio>
#include <optional>

#include "datasets/loader.h"
#include "layers/fit.h"
#include "layers/models.h"
#include "layers/options.h"

using namespace tandem;

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    Options o = parse_options(argc, argv, "Trains a network on a data set.",
                              {.data_set = "fashion-mnist", .model = "smallcnn", .epochs = 8, .learning_rate = 0.1});
    auto backend = make_backend(o);
    Dataset data = load_dataset(o.data_set, o.data, o.folder);
    std::printf("%s: %lld + %lld pictures, %d × %d, %d channel%s, %d classes\n", data.name.c_str(),
                static_cast<long long>(data.train.count()), static_cast<long long>(data.test.count()), data.side(),
                data.side(), data.channels(), data.channels() == 1 ? "" : "s", data.classes());
    auto [training, held_back] = split(data.train, o.val, o.seed);

    Augment augment = o.augment ? Augment::usual(data.side()) : Augment{};
    augment.cutout = o.cutout;
    Loader train(training,
                 {.batch = o.batch,
                  .global_batch = o.global_batch,
                  .dtype = o.dtype,
                  .augment = augment,
                  .mixup = o.mixup,
                  .drop_last = training.count() >= o.batch,
                  .seed = o.seed},
                 *backend);
    std::optional<Loader> validation;
    if (o.val) validation.emplace(held_back, LoaderOptions{.batch = 500, .dtype = o.dtype, .shuffle = false}, *backend);
    Loader test(data.test, {.batch = 500, .dtype = o.dtype, .shuffle = false}, *backend);

    auto model = make_model(o.model, data.classes(), data.channels(), data.side());
    auto optimizer = make_optimizer(o);
    FitReport report = fit(*model, cross_entropy_loss(o.label_smoothing), *optimizer, *backend,
                           {train, validation ? &*validation : nullptr, &test}, fit_options(o));
    if (!report.epochs.empty()) std::printf("test accuracy %.2f %%\n", 100 * *report.epochs.back().test_accuracy);
  });
}
