// A small residual network (He et al. 2016). Each block adds its result to its input, so the gradient can bypass every
// layer.
#include <cstdio>

#include "tandem.h"

using namespace tandem;

class Block : public Module {  // y = relu(x + norm(conv(relu(norm(conv(x))))))
 public:
  explicit Block(int channels)
      : conv1_(adopt("conv1", Conv2d::before_norm(channels, channels, 3))),
        norm1_(child<BatchNorm2d>("norm1", channels, true)),  // true: with ReLU, in the same pass over memory
        conv2_(adopt("conv2", Conv2d::before_norm(channels, channels, 3))),
        norm2_(child<BatchNorm2d>("norm2", channels, true)) {}
  Variable forward(const Variable& x) override { return norm2_(conv2_(norm1_(conv1_(x))), x); }

 private:
  Conv2d& conv1_;
  BatchNorm2d& norm1_;
  Conv2d& conv2_;
  BatchNorm2d& norm2_;
};

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    RunConfig o = parse_options(
        argc, argv, "A small ResNet on CIFAR-10.", {.epochs = 2, .learning_rate = 0.2, .augment = true},
        {"--data", "--epochs", "--batch", "--lr", "--seed", "--device", "--dtype", "--metrics", "--no-augment"});
    auto backend = make_backend(o);
    Dataset data = load_dataset("cifar-10", o.data);
    Loader train(data.train,
                 {.batch = o.batch,
                  .dtype = o.dtype,
                  .augment = {.pad_crop = o.augment ? 4 : 0, .flip = o.augment},
                  .seed = o.seed},
                 *backend);
    Loader test(data.test, {.batch = 500, .dtype = o.dtype, .shuffle = false}, *backend);

    Sequential model;
    int channels = 3;
    for (int width : {16, 32, 64}) {  // each stage halves the picture and doubles the channels
      model.adopt("conv" + std::to_string(width), Conv2d::before_norm(channels, width, 3, channels == 3 ? 1 : 2));
      model.child<BatchNorm2d>("norm" + std::to_string(width), width, true);
      model.child<Block>("block" + std::to_string(width), width);
      channels = width;
    }
    model.add<GlobalAveragePool>();
    model.add<Linear>(channels, data.train.classes);

    SGD sgd({.learning_rate = o.learning_rate, .momentum = 0.9, .nesterov = true, .weight_decay = 5e-4});
    FitReport report = fit(model, cross_entropy_loss(), sgd, *backend, {train, nullptr, &test}, o);
    if (!report.epochs.empty()) std::printf("test accuracy %.2f %%\n", 100 * *report.epochs.back().test_accuracy);
  });
}
