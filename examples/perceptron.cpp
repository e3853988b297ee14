// One layer, ten outputs, gradient descent by hand: no module, no optimizer, only two leaves, a loss, and
// w ← w − η·∂loss/∂w. The next step is mlp.cpp.
#include <cstdio>

#include "tandem.h"

using namespace tandem;

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    RunConfig o = parse_options(argc, argv, "One layer, trained by gradient descent written out.",
                                {.epochs = 3, .batch = 100, .learning_rate = 0.05},
                                {"--data", "--epochs", "--batch", "--lr", "--seed", "--device"});
    auto backend = make_backend(o);
    Dataset data = load_dataset("fashion-mnist", o.data);
    Loader train(data.train, {.batch = o.batch, .seed = o.seed}, *backend);
    Loader test(data.test, {.batch = 500, .shuffle = false}, *backend);

    const std::int64_t inputs = data.train.height() * data.train.width(), classes = data.train.classes;
    Variable w(Tensor::zeros(*backend, {classes, inputs}), true, "w");  // leaves: backward() computes their gradients
    Variable b(Tensor::zeros(*backend, {classes}), true, "b");
    auto logits = [&](const Batch& batch) { return linear(flatten(Variable(batch.images)), w, b); };

    for (int epoch = 0; epoch < o.epochs; epoch++) {
      train.start(epoch);
      for (Batch batch; train.next(batch);) {
        Variable loss = cross_entropy(logits(batch), batch.labels);
        loss.backward();
        NoGrad off;  // the update is not recorded for backward
        for (Variable* p : {&w, &b}) {
          Tensor value = p->value();
          value.copy_from((*p - o.learning_rate * Variable(p->grad())).value());
          p->zero_grad();
        }
      }
      NoGrad off;
      Tensor right = Tensor::zeros(*backend, {1}, DType::i32);
      test.start(0);
      for (Batch batch; test.next(batch);) cross_entropy(logits(batch), batch.labels, 0, &right);
      std::printf("epoch %d: test accuracy %.2f %%\n", epoch + 1, 100 * right.item() / double(data.test.count()));
    }
  });
}
