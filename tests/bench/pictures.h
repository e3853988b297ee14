// A model, and a batch of pictures for it that lies in memory: what a step is timed on, alone or under a strategy.
#pragma once
#include "core/random.h"
#include "layers/models/models.h"
#include "layers/train/strategy.h"

namespace tandem {

struct TimedModel {
  Model model;
  FlatParameters flat;
  SGD sgd{{.learning_rate = 1e-3, .momentum = 0.9}};
  Variable images;
  Tensor labels;

  TimedModel(Backend& backend, const std::string& name, std::int64_t pictures, DType dtype = DType::f32,
             const FlatMemory& memory = {})
      : model(make_model(name, 10, gray(name) ? 1 : 3, gray(name) ? 28 : 32)), flat(*model, backend, 1, memory) {
    const Shape shape = gray(name) ? Shape{pictures, 28, 28, 1} : Shape{pictures, 32, 32, 3};
    std::vector<double> pixels(std::size_t(shape.numel())), classes(static_cast<std::size_t>(pictures));
    const Philox random(3, Stream::test);
    for (std::size_t i = 0; i < pixels.size(); i++) pixels[i] = 2 * uniform(random.word(std::uint32_t(i))) - 1;
    for (std::size_t i = 0; i < classes.size(); i++) classes[i] = double(i % 10);
    images = Variable(Tensor::of(backend, shape, pixels, dtype));
    labels = Tensor::of(backend, {pictures}, classes, DType::i32);
    sgd.bind(flat);
  }
  void step(Strategy& strategy) {
    const Variable loss = cross_entropy((*model)(images), labels);
    flat.zero_gradients();
    flat.backward(loss, 1.0 / strategy.size());
    strategy.step(sgd, loss);
  }
  static bool gray(const std::string& name) { return name == "smallcnn" || name == "lenet5"; }
};

}  // namespace tandem
