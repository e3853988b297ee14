// An optimizer of your own: sign descent with momentum (signum, Bernstein et al. 2018), w ← w − η·sign(v). An optimizer
// is one pass over the flat parameter vector: a functor for one element, and apply(range), which runs it.
#include <cstdio>

#include "core/launch.h"
#include "tandem.h"

using namespace tandem;

struct SignStep {
  // Values that vary from step to step: learning rate, scale of the gradients, whether to apply this step
  const StepState* state;
  const float* g;
  float *v, *w;
  void operator()(std::int64_t i) const {
    if (state->not_finite) return;
    v[i] = 0.9f * v[i] + 0.1f * state->gradient_scale * g[i];
    w[i] -= state->learning_rate * float((v[i] > 0) - (v[i] < 0));  // padding has g = 0 and stays 0
  }
};

struct Signum : Optimizer {
  // One vector beside the parameters, the average; checkpoints store it
  explicit Signum(double learning_rate) : Optimizer(learning_rate, 0, false, {"average"}) {}
  std::string name() const override { return "signum"; }
  void apply(Range r) override {
    launch(flat().backend(), r.length(),
           SignStep{device_state(), flat().gradients.data<float>() + r.begin, vector<float>(0) + r.begin,
                    flat().values.write<float>() + r.begin});
  }
};

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    RunConfig o =
        parse_options(argc, argv, "LeNet-5 by sign descent.",
                      {.model = "lenet5", .epochs = 3, .learning_rate = 1e-3, .schedule = "cosine"},
                      {"--data", "--model", "--epochs", "--batch", "--lr", "--schedule", "--seed", "--metrics"});
    auto backend = make_backend(o);
    Dataset data = load_dataset("fashion-mnist", o.data);
    Loader train(data.train, {.batch = o.batch, .seed = o.seed}, *backend);
    Loader test(data.test, {.batch = 500, .shuffle = false}, *backend);
    auto model = make_model(o.model, data.train.classes, 1, 28);
    Signum signum(o.learning_rate);
    FitReport report = fit(model, cross_entropy_loss(), signum, *backend, {train, nullptr, &test}, o);
    if (!report.epochs.empty()) std::printf("test accuracy %.2f %%\n", 100 * *report.epochs.back().test_accuracy);
  });
}
