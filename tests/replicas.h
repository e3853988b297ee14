// What every strategy whose ranks are replicas is tried with: two models, a loop of one's own, and fit().
#pragma once

#include "dist/collectives/in_process.h"
#include "dist/strategies/all_reduce.h"
#include "tests/ranks.h"
#include "tests/training.h"

namespace tandem::test {

// With running statistics, a weight that is used twice and one that is not used at all.
struct Odd : Module {
  Conv2d& conv = adopt("conv", Conv2d::before_norm(1, 16, 3));
  BatchNorm2d& bn = child<BatchNorm2d>("bn", 16, true);
  Linear& twice = child<Linear>("twice", 16, 16);
  Linear& idle = child<Linear>("idle", 16, 16);
  Linear& fc = child<Linear>("fc", 16, 10);
  Variable forward(const Variable& x) override { return fc(twice(twice(global_average_pool(bn(conv(x)))))); }
};

struct Ended {
  std::vector<double> weights, buffers;
  std::vector<std::vector<double>> epochs = {};  // the weights at the end of each
  double loss = 0;
  std::string said;  // what it threw
};

using MakeStrategy = std::function<std::unique_ptr<Strategy>(std::unique_ptr<Communicator>)>;

inline MakeStrategy all_reduced(const AllReduceOptions& options = {}) {
  return [options](std::unique_ptr<Communicator> ranks) { return all_reduce(std::move(ranks), options); };
}

using StrategyBody = std::function<void(Strategy&, Ended&)>;

// make(rank) in a thread for each of n ranks, and then the body with that strategy.
inline std::vector<Ended> with_strategies(int n, const std::function<std::unique_ptr<Strategy>(int rank)>& make,
                                          const StrategyBody& body) {
  std::vector<Ended> runs(static_cast<std::size_t>(n));
  const auto said = ranks_say(n, [&](int r) { body(*make(r), runs[r]); });
  for (std::size_t r = 0; r < runs.size(); r++) runs[r].said = said[r];
  return runs;
}
inline std::vector<Ended> on_ranks(int n, const MakeStrategy& make, const StrategyBody& body,
                                   const InProcessOptions& wire = {.deadline = 30}) {
  auto ranks = in_process(n, wire);
  return with_strategies(
      n, [&](int r) { return make(std::move(ranks[r])); }, body);
}

inline void all_well(const std::vector<Ended>& runs) {
  for (std::size_t r = 0; r < runs.size(); r++) EXPECT_EQ(runs[r].said, "") << "rank " << r;
}
inline void same_bits(const std::vector<Ended>& runs) {
  all_well(runs);
  for (std::size_t r = 0; r < runs.size(); r++) {
    EXPECT_TRUE(runs[r].weights == runs[0].weights) << "rank " << r << " has other weights than rank 0";
    EXPECT_TRUE(runs[r].buffers == runs[0].buffers) << "rank " << r << " has other statistics than rank 0";
    EXPECT_TRUE(runs[r].epochs == runs[0].epochs) << "rank " << r << " had other weights at the end of an epoch";
  }
}

// What every rank threw holds these parts.
inline void all_say(const std::vector<Ended>& runs, const std::vector<std::string>& parts) {
  for (const Ended& run : runs) EXPECT_TRUE(holds(run.said, parts));
}
// All ranks ended with an error, and those that did not die name the one that did.
inline void all_name(const std::vector<Ended>& runs, int dead) {
  ASSERT_GE(dead, 0);
  for (std::size_t r = 0; r < runs.size(); r++) {
    EXPECT_NE(runs[r].said, "") << "rank " << r;
    if (int(r) == dead) continue;
    EXPECT_TRUE(holds(runs[r].said, {"rank " + std::to_string(dead) + ", which has left"}));
  }
}

inline double furthest(const std::vector<double>& a, const std::vector<double>& b) { return difference(a, b).error; }

// ---- a loop of one's own --------------------------------------------------------------------------------------------
// 209 pictures: the last batch of an epoch is smaller, and its shares differ in size.
inline Dataset odd_number_of_pictures() {
  return synthetic({.side = 8, .channels = 1, .train = 209, .test = 10, .seed = 3});
}

using MakeOptimizer = std::function<std::unique_ptr<Optimizer>()>;
inline std::unique_ptr<Optimizer> usual_sgd() {
  return std::make_unique<SGD>(SGDOptions{.learning_rate = 0.1, .momentum = 0.9, .weight_decay = 1e-3});
}

struct OwnLoop {
  std::int64_t global_batch = 42;
  int steps = 1;
  double clip = 0;
  int accumulate = 1;
  MakeOptimizer optimizer = usual_sgd;
  std::function<double(double step)> rate = {};  // empty: the optimizer's own
  std::int64_t done = 0, of = 0;                 // steps that were made before, of so many
  std::int64_t epochs = 1;                       // of the run
  bool begins_epochs = true;                     // tells the strategy
  bool ends_epochs = true;                       // and of their end, and has it merge the statistics
  DType dtype = DType::f64;
};

// The seven lines of a user's own loop, on any strategy, on the reference backend.
template <class Model>
void train(Strategy& strategy, Ended& run, const OwnLoop& o) {
  auto backend = reference_backend(1);
  Dataset data = odd_number_of_pictures();
  Loader source(data.train,
                {.batch = o.global_batch, .seed = 5, .rank = strategy.rank(), .world = strategy.size(), .prefetch = 0},
                *backend);
  Model model;
  // begin() makes them equal
  FlatParameters flat(model, *backend, 100 + std::uint64_t(strategy.rank()), {}, o.dtype);
  const auto optimizer = o.optimizer();
  optimizer->clip_norm = o.clip;
  optimizer->bind(flat);
  strategy.begin(flat, *optimizer);
  const RunPlan plan{.epochs = o.epochs, .done = o.done, .steps_per_epoch = double(o.of), .learning_rate = o.rate};
  const std::int64_t per_epoch = source.batches_per_epoch();
  Accumulation accumulation(flat, *optimizer, o.accumulate, per_epoch);
  int done = 0;
  for (int epoch = 0; done < o.steps; epoch++) {
    if (o.begins_epochs) strategy.begin_epoch(epoch, plan);
    source.start(epoch);
    for (Batch batch; done < o.steps && source.next(batch);) {
      if (o.rate) optimizer->learning_rate(o.rate(double(o.done + done)));
      accumulation.begin(batch);
      Variable x(batch.images.cast(o.dtype));
      Variable loss = cross_entropy(model(x), batch.labels);
      if (!accumulation.backward(loss, batch)) continue;
      strategy.step(*optimizer, Variable(accumulation.loss()));
      done++;
    }
    if (o.ends_epochs) strategy.end_epoch({.epochs = epoch + 1});
    run.epochs.push_back(flat.values.values());
  }
  if (o.ends_epochs) strategy.synchronize(Strategy::Shared::buffers, flat, *optimizer);
  strategy.end();
  run.weights = flat.values.values();
  run.buffers = flat.buffers.values();
}

// ---- the whole loop -------------------------------------------------------------------------------------------------
// fit() of a fresh model.
template <class Model>
FitReport fit_model(Strategy& strategy, Ended& run, const Dataset& data, const LoaderOptions& batches,
                    Optimizer& optimizer, const RunConfig& options, Backend& backend, double smoothing = 0) {
  Loader train(data.train, batches, backend), test(data.test, {.batch = 50, .shuffle = false, .prefetch = 0}, backend);
  Model model;
  const FitReport report =
      fit(model, cross_entropy_loss(smoothing), optimizer, backend, {train, nullptr, &test}, options, &strategy);
  run.weights = parameter_values(model);
  run.buffers = buffer_values(model);
  return report;
}

inline void fit_on(Strategy& strategy, Ended& run, const RunConfig& options,
                   const std::function<void(Batch&, std::int64_t)>& each = {}, double rate = 0.05) {
  Dataset data = synthetic({.side = 8, .channels = 1, .train = 203, .test = 61, .seed = 3});
  std::int64_t made = 0;
  LoaderOptions o{.batch = 48, .seed = 2, .prefetch = 0};
  if (each) o.transform = [&](Batch& batch) { each(batch, made++); };
  SGD sgd({.learning_rate = rate, .momentum = 0.9});
  const FitReport report = fit_model<Odd>(strategy, run, data, o, sgd, options, *reference_backend(1));
  run.loss = double(report.steps);
  run.buffers.push_back(*report.epochs.back().test_accuracy);  // over all ranks
  run.buffers.push_back(report.epochs.back().train_loss);
}

}  // namespace tandem::test
