// A strategy of your own: a schedule and a merge of weights (dist/strategies/rounds.h). Once in eight steps the weights
// of all ranks are summed while training continues. Two steps later each rank moves its weights by half of the
// difference between the mean and the weights that it sent, so ranks explore more than under local SGD.
//
//   build/tandem-run -n 4 --strategy half-way build/own_strategy
#include "dist/job/job.h"
#include "dist/strategies/rounds.h"
#include "tandem.h"

using namespace tandem;

struct HalfWay : RoundMethod {
  // Called after each step: the sum begins after step 7, 15, …, and is merged after step 1, 9, …
  Turn next(const Moment& now) override { return {.sends = now.step % 8 == 7, .merges = now.step % 8 == 1}; }

  // x += (mean − sent)/2
  void merge(Exchanged& e) override {
    if (e.turn.waits) return RoundMethod::merge(e);  // at the end of an epoch: the mean, which is evaluated and saved
    float* x = e.x.write<float>();
    const float *sum = e.sum.data<float>(), *sent = e.sent.data<float>();
    for (std::int64_t i = 0; i < e.x.numel(); i++) x[i] += (sum[i] / float(e.ranks) - sent[i]) / 2;
  }
};

// Makes the strategy of this name; null for other names.
StrategyMaker half_way_named(const std::string& name) {
  if (name != "half-way") return {};
  return [] {
    return rounds({.everybody = Job().communicator()}, "half-way", [] { return std::make_unique<HalfWay>(); });
  };
}

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    RunConfig o = parse_options(argc, argv, "LeNet-5 by half-way averaging: start it with tandem-run -n 4.",
                                {.model = "lenet5", .epochs = 2, .learning_rate = 0.05},
                                {"--data", "--model", "--epochs", "--batch", "--lr", "--seed", "--metrics"});
    auto backend = make_backend(o);
    Dataset data = load_dataset("fashion-mnist", o.data);
    Loader train(data.train, {.batch = o.batch, .seed = o.seed}, *backend);
    Loader test(data.test, {.batch = 500, .shuffle = false}, *backend);
    auto model = make_model(o.model, data.train.classes, 1, 28);
    SGD sgd({.learning_rate = o.learning_rate, .momentum = 0.9});
    auto strategy = strategy_from_environment({{"half-way", half_way_named}});
    fit(*model, cross_entropy_loss(), sgd, *backend, {train, nullptr, &test}, o, strategy.get());
  });
}
