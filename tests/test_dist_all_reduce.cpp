// Synchronous all-reduce on in-process ranks: what K ranks compute is what one machine computes with the whole batch.
#include <unistd.h>

#include <array>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/files/files.h"
#include "dist/strategies/all_reduce.h"
#include "dist/strategies/reducer.h"
#include "tests/replicas.h"

namespace tandem::test {
namespace {

std::vector<Ended> on_ranks(int n, const StrategyBody& body, const AllReduceOptions& options = {},
                            const InProcessOptions& wire = {.deadline = 30}) {
  return on_ranks(n, all_reduced(options), body, wire);
}

template <class Model>
void train(Strategy& strategy, Ended& run, std::int64_t global_batch, int steps, double clip = 0, int accumulate = 1) {
  train<Model>(strategy, run, {.global_batch = global_batch, .steps = steps, .clip = clip, .accumulate = accumulate});
}

TEST(AllReduce, RanksTogetherAreOneMachine) {
  // 209 pictures in batches of 42 or 48: the last batch of an epoch is smaller, and its shares differ in size.
  for (int n : {2, 3, 4, 7, 8}) {
    const std::int64_t batch = n == 8 ? 48 : n == 4 ? 44 : 42;
    for (auto [steps, tolerance] : {std::pair{1, 1e-12}, {50, 1e-9}}) {
      Ended whole;
      Strategy one;
      // One machine draws with the seed that rank 0 has.
      train<Plain>(one, whole, batch, steps, 0.5);
      auto runs = on_ranks(n, [&, steps = steps](Strategy& s, Ended& run) { train<Plain>(s, run, batch, steps, 0.5); });
      same_bits(runs);
      EXPECT_LE(furthest(runs[0].weights, whole.weights), tolerance) << n << " ranks, " << steps << " steps";
    }
  }
}

TEST(AllReduce, AccumulatedBatchesAreOneMachinesToo) {
  Ended whole;
  Strategy one;
  train<Plain>(one, whole, 24, 20, 0, 3);
  auto runs = on_ranks(3, [&](Strategy& s, Ended& run) { train<Plain>(s, run, 24, 20, 0, 3); });
  same_bits(runs);
  EXPECT_LE(furthest(runs[0].weights, whole.weights), 1e-9);
}

TEST(AllReduce, BucketsOfAnySizeGiveTheSame) {
  auto large = on_ranks(3, [](Strategy& s, Ended& run) { train<Odd>(s, run, 42, 12); });
  auto small = on_ranks(3, [](Strategy& s, Ended& run) { train<Odd>(s, run, 42, 12); }, {.bucket_bytes = 8192});
  same_bits(large);
  same_bits(small);
  EXPECT_LE(furthest(small[0].weights, large[0].weights), 1e-12);
}

TEST(AllReduce, Bf16OnTheWireLeavesRanksEqual) {
  auto run = [](Strategy& s, Ended& run) { train<Plain>(s, run, {.steps = 10, .dtype = DType::f32}); };
  auto exact = on_ranks(3, run), rounded = on_ranks(3, run, {.wire = DType::bf16});
  same_bits(exact);
  same_bits(rounded);
  EXPECT_GT(furthest(rounded[0].weights, exact[0].weights), 0);
  EXPECT_LE(furthest(rounded[0].weights, exact[0].weights), 0.01);
}

TEST(AllReduce, StatisticsAreMergedAsOverAllPictures) {
  const auto drawn = [](int rank, std::int64_t n) { return numbers("of rank " + std::to_string(rank), n, 0.5, 2); };
  auto runs = on_ranks(2, [&](Strategy& s, Ended& run) {
    auto backend = reference_backend(1);
    Odd model;
    FlatParameters flat(model, *backend, 1, {}, DType::f64);
    SGD sgd({});
    s.begin(flat, sgd);
    flat.buffers.copy_from(
        Tensor::of(*backend, flat.buffers.shape(), drawn(s.rank(), flat.buffers.numel()), DType::f64));
    s.synchronize(Strategy::Shared::buffers, flat, sgd);
    run.buffers = flat.buffers.values();
    for (const auto& seg : flat.buffer_ranges()) run.weights.push_back(double(seg.begin));
  });
  same_bits(runs);
  const auto mean = std::size_t(runs[0].weights[0]), var = std::size_t(runs[0].weights[1]);
  const auto n = std::int64_t(runs[0].buffers.size());
  const Numbers a = drawn(0, n), b = drawn(1, n);
  for (std::size_t m = mean, v = var; m < mean + 16; m++, v++) {
    EXPECT_NEAR(runs[0].buffers[m], (a[m] + b[m]) / 2, 1e-12);
    EXPECT_NEAR(runs[0].buffers[v], (a[v] + b[v]) / 2 + (a[m] - b[m]) * (a[m] - b[m]) / 4, 1e-12);
  }
}

// ---- the whole loop -------------------------------------------------------------------------------------------------
// One file with the lanes of all ranks, their clocks aligned: an all-reduce ends nowhere before it has begun
// everywhere.
TEST(AllReduce, ATraceHoldsAllRanks) {
  const TemporaryFolder folder;
  const std::string file = folder.file("trace");
  const int n = 3;
  same_bits(on_ranks(n,
                     [&](Strategy& s, Ended& run) {
                       usleep(useconds_t(s.rank()) * 30000);  // their traces begin at different times
                       fit_on(s, run, {.progress = false, .profiler = {.dot = {}, .trace = file, .warm_up = 1}});
                     },
                     {.bucket_bytes = 4096}));
  const auto trace = nlohmann::json::parse(read_file(file));
  std::map<int, std::vector<std::array<double, 3>>> spans;  // by number: rank, begin, end in µs
  std::map<int, std::string> names;
  for (const auto& e : trace.at("traceEvents")) {
    const int rank = e.at("pid");
    if (e.at("name") == "process_name") names[rank] = e.at("args").at("name").get<std::string>();
    if (e.value("cat", "") != "exchange") continue;
    const double begin = e.at("ts"), seconds = e.at("dur");
    spans[e.at("args").at("number").get<int>()].push_back({double(rank), begin, begin + seconds});
  }
  for (int r = 0; r < n; r++) EXPECT_EQ(names[r], "rank " + std::to_string(r));
  EXPECT_GT(spans.size(), 4u);
  for (const auto& [number, of] : spans) {
    ASSERT_EQ(of.size(), std::size_t(n)) << "all-reduce " << number;
    double last_begin = 0, first_end = 1e18;
    for (const auto& s : of) last_begin = std::max(last_begin, s[1]), first_end = std::min(first_end, s[2]);
    EXPECT_LE(last_begin, first_end + 5000)
        << "all-reduce " << number;  // the clocks' error: half a round trip of threads
  }
}

// ---- what the batch and the learning rate of several ranks are ------------------------------------------------------
// fit() with a model without batch norm; the last epoch's report.
EpochReport fit_plain(Strategy& strategy, Ended& run, const LoaderOptions& batches, const RunConfig& options,
                      Optimizer& optimizer) {
  Dataset data = synthetic({.side = 8, .channels = 1, .train = 203, .test = 61, .seed = 3});
  const auto backend = reference_backend(1);
  return fit_model<Plain>(strategy, run, data, batches, optimizer, options, *backend).epochs.back();
}

TEST(AllReduce, FitOnSeveralRanksComputesWhatOneMachineComputes) {
  auto trains = [](Strategy& s, Ended& run) {
    SGD sgd({.learning_rate = 0.05, .momentum = 0.9});
    fit_plain(s, run, {.batch = 48, .seed = 2, .prefetch = 0}, quiet(3), sgd);
  };
  Strategy one;
  Ended alone;
  trains(one, alone);
  for (int n : {2, 3, 5, 8}) {
    const auto runs = on_ranks(n, trains);
    same_bits(runs);
    EXPECT_LT(furthest(runs[0].weights, alone.weights), 1e-5) << n << " ranks";
  }
}

TEST(AllReduce, TheLearningRateFollowsABatchPerRank) {
  for (const auto& [scale, rate, clip] : {std::tuple{RateScale::none, 0.05, 0.0},
                                          {RateScale::square_root, 0.1, 0.0},
                                          {RateScale::linear, 0.2, 0.0},
                                          {RateScale::clipped, 0.2, 1.0}})
    for (std::int64_t own : {0, 12}) {
      const auto runs = on_ranks(4, [&, scale = scale, rate = rate, clip = clip](Strategy& s, Ended& run) {
        SGD sgd({.learning_rate = 0.05, .momentum = 0.9});
        const RunConfig o{.epochs = 4, .lr_scale = scale, .progress = false};
        double clipped_at = -1;
        LoaderOptions batches{.batch = 12, .batch_per_rank = own, .seed = 2, .prefetch = 0};
        batches.transform = [&](Batch&) { clipped_at = sgd.clip_norm; };
        const EpochReport e = fit_plain(s, run, batches, o, sgd);
        EXPECT_DOUBLE_EQ(e.learning_rate, own ? rate : 0.05) << name_of(scale);
        EXPECT_EQ(clipped_at, own ? clip : 0);
        EXPECT_EQ(sgd.learning_rate(), 0.05) << "a second fit must not scale what was scaled";
        EXPECT_EQ(sgd.clip_norm, 0);
      });
      same_bits(runs);
    }
}

// The first epoch of `build/fashion_mnist --model MODEL` on so many of its pictures: test accuracy, on n ranks.
double fashion(const Dataset& data, const std::string& model, int n, const LoaderOptions& batches) {
  double accuracy = 0;
  auto trains = [&](Strategy& s, Ended&) {
    auto backend = cpu_backend(1);
    Loader train(data.train, batches, *backend), test(data.test, {.batch = 500, .shuffle = false}, *backend);
    auto net = make_model(model, 10, 1, 28);
    SGD sgd({.learning_rate = 0.05, .momentum = 0.9, .nesterov = true, .weight_decay = 5e-4});
    const RunConfig o{.schedule = "one-cycle", .progress = false};
    const FitReport report = fit(*net, cross_entropy_loss(), sgd, *backend, {train, nullptr, &test}, o, &s);
    if (s.rank() == 0) accuracy = *report.epochs.back().test_accuracy;
  };
  for (const Ended& e : on_ranks(n, trains, {}, {.deadline = 120})) EXPECT_EQ(e.said, "");
  return accuracy;
}

// The short cases of dist/REFERENCE.md's table. With the learning rate times the ranks, LeNet-5 guesses on 8 of them.
TEST(AllReduce, AccuracyOnManyRanks) {
  const Dataset data = load_dataset("fashion-mnist", "");
  if (data.train.count() < 60000) GTEST_SKIP() << "not all of Fashion-MNIST is here";
  for (const char* model : {"lenet5", "mlp"}) {
    Dataset few = data;
    few.train = split(data.train, 60000 - 12800, 1).first;
    const LoaderOptions cut{.batch = 128, .drop_last = true, .seed = 1},
        own{.batch_per_rank = 128, .drop_last = true, .seed = 1};
    const double alone = fashion(few, model, 1, cut);
    for (int n : {4, 8}) EXPECT_NEAR(fashion(few, model, n, cut), alone, 0.015) << model << " on " << n << " ranks";
    if (model == std::string("mlp")) {
      EXPECT_GT(fashion(data, model, 8, own), alone - 0.05) << model << " on 8 ranks, 128 pictures on each";
    }
  }
}

TEST(AllReduce, RanksOfOtherOptimizersAreNamed) {
  const auto runs = on_ranks(2, [](Strategy& s, Ended& run) {
    SGD sgd({.learning_rate = 0.1});
    LARS lars({.learning_rate = 0.1});
    fit_plain(s, run, {.batch = 48, .prefetch = 0}, quiet(1), s.rank() == 1 ? static_cast<Optimizer&>(lars) : sgd);
  });
  all_say(runs, {"have different options: --optimizer sgd and --optimizer lars"});
}

TEST(AllReduce, ALossThatIsNotFiniteStopsEveryRank) {
  all_say(on_ranks(3, [](Strategy& s, Ended& run) { fit_on(s, run, quiet(3), {}, 1e30); }), {"not finite"});
}

// What was under way while backward went on, and how long the step waited afterwards: no second counts as both.
TEST(AllReduce, TheReducerTellsWhatBackwardHid) {
  using Clock = std::chrono::steady_clock;
  using std::chrono::milliseconds;
  struct Timed : Work::Operation {
    Clock::time_point until = Clock::now() + milliseconds(60);
    bool advance() override { return Clock::now() >= until; }
    void wait() override {}
  };
  auto ranks = alone();
  const auto begin = Clock::now();
  auto since = [&](Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); };
  Reducer reducer(*ranks, 30);
  double before = 0;
  for (int step = 0; step < 2; step++) {
    auto work = [](Communicator&) { return Work(std::make_unique<Timed>()); };
    const auto backward = Clock::now();
    reducer.add({*ranks, nullptr, work});
    std::this_thread::sleep_for(milliseconds(30));
    reducer.waits();
    before += since(backward);
    reducer.add({*ranks, nullptr, work});
    reducer.finish();
    std::this_thread::sleep_for(milliseconds(20));  // the update
  }
  const auto [hidden, exposed] = reducer.seconds();
  EXPECT_GT(hidden, 0);
  EXPECT_LE(hidden, before);
  EXPECT_GE(exposed, 2 * 0.06);
  EXPECT_LE(hidden + exposed, since(begin) - 2 * 0.02);
}

// The first step waits for the ranks' agreement on an order too, but no gradient is under way then.
TEST(AllReduce, ALateRankMakesNoShareNegative) {
  static thread_local bool late;
  struct Late : Plain {
    Variable forward(const Variable& x) override {
      if (std::exchange(late, false)) std::this_thread::sleep_for(std::chrono::milliseconds(200));
      return Plain::forward(x);
    }
  };
  auto runs = on_ranks(2, [](Strategy& s, Ended& run) {
    late = s.rank() == 1;
    train<Late>(s, run, 42, 1);
    const auto all = s.end();
    std::map<std::string, double> measured(all.begin(), all.end());
    EXPECT_GE(measured["hidden_share"], 0) << "rank " << s.rank();
    EXPECT_LE(measured["hidden_share"], 1) << "rank " << s.rank();
    EXPECT_LE(measured["exposed_seconds"], measured["exchange_seconds"]) << "rank " << s.rank();
    EXPECT_GT(measured["exposed_seconds"], 0) << "rank " << s.rank();
  });
  same_bits(runs);
}

TEST(AllReduce, RanksThatWereToldDifferentThingsAreRefused) {
  auto said = [](const std::function<void(RunConfig&)>& other, double rate = 0.05) {
    return on_ranks(3, [&](Strategy& s, Ended& run) {
      RunConfig o = quiet(1);
      if (s.rank() == 2) other(o);
      fit_on(s, run, o, {}, s.rank() == 2 ? rate : 0.05);
    });
  };
  for (const Ended& run : said([](RunConfig& o) { o.seed = 7; }))
    EXPECT_EQ(run.said, "rank 0 and rank 2 have different options: --seed 1 and --seed 7");
  for (const Ended& run : said([](RunConfig&) {}, 0.1))
    EXPECT_EQ(run.said, "rank 0 and rank 2 have different options: --lr 0.05 and --lr 0.1");
  same_bits(said([](RunConfig& o) { o.settings = {{"--data", "elsewhere"}}; }));
}

TEST(AllReduce, ParametersThatDriftApartAreFound) {
  auto runs = on_ranks(3, [](Strategy& s, Ended& run) {
    auto backend = reference_backend(1);
    Plain model;
    FlatParameters flat(model, *backend, 1);
    SGD sgd({});
    s.begin(flat, sgd);
    if (s.rank() == 2) flat.values.range(70, {1}).fill(0.125);
    s.end();
    run.said = "not found";
  });
  all_say(runs, {"rank 0 and rank 2 no longer have the same"});
}

}  // namespace
}  // namespace tandem::test
