// Trains a small network on Fashion-MNIST, on whatever it was started on. The whole program.
#include <cstdio>
#include <optional>

#include "datasets/loader.h"
#include "layers/fit.h"
#include "layers/models.h"
#include "layers/options.h"

using namespace tandem;

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    Options o = parse_options(argc, argv, "Trains a network on Fashion-MNIST.",
                              {.model = "smallcnn", .epochs = 8, .learning_rate = 0.1});
    auto backend = make_backend(o);
    Dataset data = load_dataset("fashion-mnist", o.data);
    auto [training, held_back] = split(data.train, o.val, o.seed);

    Loader train(training,
                 {.batch = o.batch,
                  .global_batch = o.global_batch,
                  .dtype = o.dtype,
                  .augment = {.pad_crop = o.augment ? 4 : 0, .flip = o.augment, .cutout = o.cutout},
                  .mixup = o.mixup,
                  .drop_last = true,
                  .seed = o.seed},
                 *backend);
    std::optional<Loader> validation;
    if (o.val) validation.emplace(held_back, LoaderOptions{.batch = 500, .dtype = o.dtype, .shuffle = false}, *backend);
    Loader test(data.test, {.batch = 500, .dtype = o.dtype, .shuffle = false}, *backend);

    auto model = make_model(o.model, 10, 1, 28);
    auto optimizer = make_optimizer(o);
    FitReport report = fit(*model, cross_entropy_loss(o.label_smoothing), *optimizer, *backend,
                           {train, validation ? &*validation : nullptr, &test}, fit_options(o));
    if (!report.epochs.empty()) std::printf("test accuracy %.2f %%\n", 100 * *report.epochs.back().test_accuracy);
  });
}
