// Batch norm over all ranks: what K ranks compute with their shares is what one machine computes with the whole batch.
#include "dist/strategies/replicas.h"
#include "dist/strategies/sync_batch_norm.h"
#include "tests/replicas.h"
#include "tests/twin.h"

namespace tandem::test {
namespace {

// The gatherer of one rank over a communicator that nobody else uses.
std::shared_ptr<GatherNumbers> across(Communicator& c) {
  return std::make_shared<GatherNumbers>([&c](const Numbers& mine) { return gather_numbers(c, mine); });
}

// ---- the operation --------------------------------------------------------------------------------------------------
struct Form {
  bool relu, residual;
};

using Result = std::map<std::string, Numbers>;

constexpr std::int64_t channels = 5;

// Rows [begin, end) of 12; everything else is the same for all.
Result normalise(Backend& backend, DType type, Form form, std::int64_t begin, std::int64_t end,
                 const std::shared_ptr<GatherNumbers>& ranks) {
  auto leaf = [&](const char* name, bool rows) {
    Numbers v = numbers(name, (rows ? 12 : 1) * channels, -1, 3);
    if (rows) v = Numbers(v.begin() + begin * channels, v.begin() + end * channels);
    const Shape shape = rows ? Shape{end - begin, channels} : Shape{channels};
    return Variable(Tensor::of(backend, shape, v, type), true, name);
  };
  Variable x = leaf("x", true), gamma = leaf("gamma", false), beta = leaf("beta", false), residual;
  if (form.residual) residual = leaf("residual", true);
  Tensor mean = Tensor::full(backend, {channels}, 0.5, type), variance = Tensor::full(backend, {channels}, 2, type);
  const BatchNormOptions o{.momentum = 0.3, .relu = form.relu};
  Variable y = ranks ? sync_batch_norm(x, gamma, beta, mean, variance, o, residual, ranks)
                     : batch_norm(x, gamma, beta, mean, variance, o, residual);
  const Variable weights = leaf("weights", true).detach();
  sum(y * y * weights).backward();
  return {{"y", y.value().values()},
          {"dx", x.grad().values()},
          {"dgamma", gamma.grad().values()},
          {"dbeta", beta.grad().values()},
          {"mean", mean.values()},
          {"variance", variance.values()},
          {"dresidual", form.residual ? residual.grad().values() : Numbers()}};
}

void parts_are_the_whole(const std::function<std::unique_ptr<Backend>()>& make, DType type, double tolerance) {
  auto backend = make();
  for (const std::vector<std::int64_t>& cuts :
       {std::vector<std::int64_t>{0, 6, 12}, {0, 1, 12}, {0, 5, 6, 12}, {0, 1, 2, 3, 12}})
    for (Form form : {Form{false, false}, {true, false}, {false, true}, {true, true}}) {
      const Result whole = normalise(*backend, type, form, 0, 12, nullptr);
      const int n = int(cuts.size()) - 1;
      auto ranks = in_process(n, {.deadline = 30});
      std::vector<Result> parts(static_cast<std::size_t>(n));
      all_well(ranks_say(n, [&](int r) {
        auto own = make();
        const auto i = std::size_t(r);
        parts[i] = normalise(*own, type, form, cuts[i], cuts[i + 1], across(*ranks[i]));
      }));
      Result joined = parts[0];
      for (int r = 1; r < n; r++) {
        Result& p = parts[r];
        for (const char* rows : {"y", "dx", "dresidual"})
          joined[rows].insert(joined[rows].end(), p[rows].begin(), p[rows].end());
        for (const char* sum : {"dgamma", "dbeta"})
          for (std::size_t c = 0; c < channels; c++) joined[sum][c] += p[sum][c];
        for (const char* equal : {"mean", "variance"}) EXPECT_EQ(p[equal], parts[0][equal]) << equal << ", rank " << r;
      }
      for (const auto& [name, want] : whole)
        EXPECT_LE(furthest(joined[name], want), tolerance)
            << name << ", " << n << " ranks" << (form.relu ? ", relu" : "") << (form.residual ? ", residual" : "")
            << ", first rows " << cuts[1];
    }
}

TEST(SyncBatchNorm, RanksTogetherNormaliseAsOneMachine) {
  parts_are_the_whole([] { return reference_backend(1); }, DType::f64, 1e-12);
  parts_are_the_whole([] { return cpu_backend(1); }, DType::f32, 2e-5);
}

TEST(SyncBatchNorm, AMeanThatIsFarAwayLeavesTheVariance) {
  auto backend = reference_backend(1);
  auto two = in_process(2, {.deadline = 30});
  all_well(ranks_say(2, [&](int r) {
    auto own = reference_backend(1);
    Tensor mean = Tensor::zeros(*own, {1}, DType::f64), variance = Tensor::zeros(*own, {1}, DType::f64);
    const Variable one(Tensor::full(*own, {1}, 1, DType::f64));
    const double at = 1e6 + r;  // 1e6, 1e6 and 1e6 + 1, 1e6 + 1
    sync_batch_norm(Variable(Tensor::of(*own, {2, 1}, {at, at}, DType::f64)), one, one, mean, variance, {.momentum = 1},
                    {}, across(*two[r]));
    require(std::abs(variance.item() - 1.0 / 3) < 1e-12, "the variance is ", variance.item());
  }));
}

// ---- in training ----------------------------------------------------------------------------------------------------
// All forms; the residual's gradient and the convolution's meet before bn1.
struct Block : Module {
  Conv2d& conv1 = adopt("conv1", Conv2d::before_norm(1, 8, 3));
  BatchNorm2d& bn1 = child<BatchNorm2d>("bn1", 8);
  Conv2d& conv2 = adopt("conv2", Conv2d::before_norm(8, 8, 3));
  BatchNorm2d& bn2 = child<BatchNorm2d>("bn2", 8, true);
  Conv2d& conv3 = adopt("conv3", Conv2d::before_norm(8, 8, 3));
  BatchNorm2d& bn3 = child<BatchNorm2d>("bn3", 8, true);
  Linear& fc = child<Linear>("fc", 8, 10);
  Variable forward(const Variable& x) override {
    Variable in = bn1(conv1(x));
    return fc(global_average_pool(bn3(conv3(bn2(conv2(in))), in)));
  }
};

std::vector<Ended> on_ranks(int n, const StrategyBody& body) {
  return on_ranks(n, all_reduced({.bucket_bytes = 4096}), body);
}

// In double. Of 37 pictures in batches of 24, the second batch has 13, which no number of ranks here divides.
void train(Strategy& strategy, Ended& run, int steps, bool sync) {
  auto backend = reference_backend(1);
  Dataset data = synthetic({.side = 6, .channels = 1, .train = 37, .test = 10, .seed = 3});
  Loader source(data.train, {.batch = 24, .seed = 5, .rank = strategy.rank(), .world = strategy.size(), .prefetch = 0},
                *backend);
  Block model;
  Task task = classification();
  strategy.prepare(model, task, {.sync_batch_norm = sync});
  FlatParameters flat(model, *backend, 100, {}, DType::f64);
  BoundSgd sgd(flat, {.learning_rate = 0.1, .momentum = 0.9});
  strategy.begin(flat, sgd);
  int done = 0;
  for (std::int64_t epoch = 0; done < steps; epoch++) {
    // One that is uneven comes first.
    source.start(epoch, epoch == 0 ? 1 : 0);
    for (Batch batch; done < steps && source.next(batch); done++) {
      Variable loss = cross_entropy(model(Variable(batch.images.cast(DType::f64))), batch.labels);
      flat.zero_gradients();
      flat.backward(loss, double(batch.size()) / double(batch.over_ranks()));
      strategy.step(sgd, loss);
    }
  }
  strategy.synchronize(Strategy::Shared::buffers, flat, sgd);
  strategy.end();
  run.weights = flat.values.values();
  run.buffers = flat.buffers.values();
  model.train();  // what is left belongs to no rank
  model(Variable(Tensor::of(*backend, {2, 6, 6, 1}, numbers("alone", 72), DType::f64)));
}

TEST(SyncBatchNorm, RanksTogetherTrainAsOneMachine) {
  for (int n : {2, 3, 4})
    for (auto [steps, tolerance] : {std::pair{1, 1e-12}, {12, 1e-9}}) {
      Ended whole, without;
      Strategy one;
      train(one, whole, steps, true);
      train(one, without, steps, false);
      EXPECT_TRUE(without.weights == whole.weights) << "on one machine it must change nothing";
      auto runs = on_ranks(n, [&, steps = steps](Strategy& s, Ended& run) { train(s, run, steps, true); });
      same_bits(runs);
      EXPECT_LE(furthest(runs[0].weights, whole.weights), tolerance) << n << " ranks, " << steps << " steps";
      EXPECT_LE(furthest(runs[0].buffers, whole.buffers), tolerance) << n << " ranks, " << steps << " steps";
      auto apart = on_ranks(n, [&, steps = steps](Strategy& s, Ended& run) { train(s, run, steps, false); });
      EXPECT_GT(furthest(apart[0].weights, whole.weights), 1e-4) << "this test would not see it";
    }
}

TEST(SyncBatchNorm, RanksThatDisagreeAboutItAreTold) {
  all_say(on_ranks(2, [](Strategy& s, Ended& r) { train(s, r, 2, s.rank() == 0); }),
          {"start all ranks with the same program and options"});
}

// The whole loop, in single precision; on twins of devices, too.
void fit_on(Backend& backend, Strategy& strategy, Ended& run, RunConfig options, int broken = -1) {
  Dataset data = synthetic({.side = 6, .channels = 1, .train = 61, .test = 20, .seed = 3});
  LoaderOptions o{.batch = 24 / strategy.size(), .seed = 2, .prefetch = 0};
  if (strategy.rank() == broken) o.transform = [](Batch& b) { b.images.fill(std::nan("")); };
  SGD sgd({.learning_rate = 0.05, .momentum = 0.9});
  options.progress = false;
  options.sync_batch_norm = true;
  fit_model<Block>(strategy, run, data, o, sgd, options, backend);
}

std::vector<Ended> fits(int n, const RunConfig& options, int broken = -1) {
  return on_ranks(n, [&](Strategy& s, Ended& run) {
    auto backend = reference_backend(1);
    fit_on(*backend, s, run, options, broken);
  });
}

TEST(SyncBatchNorm, FitEndsWithTheSameOnEveryRank) {
  RunConfig shown{.epochs = 2};
  shown.profiler.summary = true;  // for which rank 0 runs the model by itself
  testing::internal::CaptureStdout();
  same_bits(fits(3, shown));
  EXPECT_TRUE(holds(testing::internal::GetCapturedStdout(), {"bn3"}));
  same_bits(fits(2, {.epochs = 2, .accumulate = 2}));
}

// The ranks look for the cause each by itself: the one that has it finds it before it runs the model.
TEST(SyncBatchNorm, ALossThatIsNotFiniteStopsEveryRank) {
  all_say(fits(3, {.epochs = 3}, 1), {"the loss or its gradient is not finite"});
}

TEST(SyncBatchNorm, DevicesGiveTheBitsOfTheHost) {
  const auto host = fits(2, {.epochs = 3});
  testing::internal::CaptureStderr();
  const auto twins = on_ranks(2, [&](Strategy& s, Ended& run) {
    AsynchronousTwin twin;
    fit_on(twin, s, run, {.epochs = 3});
  });
  EXPECT_TRUE(holds(testing::internal::GetCapturedStderr(), {"cannot be recorded: batch norm exchanges"}));
  same_bits(host);
  same_bits(twins);
  EXPECT_TRUE(twins[0].weights == host[0].weights && twins[0].buffers == host[0].buffers);
}

}  // namespace
}  // namespace tandem::test
