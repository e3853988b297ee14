// The parameter server as a strategy of fit() and of loops of one's own, on ranks that are threads: with one worker it
// is one machine, with bsp it is all-reduce, and otherwise every batch is trained once, whoever is how fast.
#include <mutex>

#include "dist/strategies/all_reduce.h"
#include "dist/strategies/local_steps.h"
#include "dist/strategies/parameter_server.h"
#include "dist/strategies/registry.h"
#include "tests/replicas.h"
#include "tests/support_channels.h"

namespace tandem::test {
namespace {

struct Fitted {
  std::vector<double> weights, buffers;
  FitReport report;
  std::map<std::string, double> measures = {};
};

struct Recipe {
  RunConfig fit = {.epochs = 2, .schedule = "cosine", .progress = false};
  SGDOptions sgd = {.learning_rate = 0.05, .momentum = 0.9, .weight_decay = 1e-3};
  std::int64_t batch = 16;
  double clip = 0;
  int test = 40, prefetch = 0;
  std::function<void(Batch&)> transform = {};
  int milliseconds = 0;  // that a step takes longer
  StragglerEmulation stragglers = {};
  double slow = 0;  // seconds that the first batch of an evaluation takes
};

struct ParameterServer : testing::Test {
  Recipe run;
};

thread_local bool trains = false;  // this thread runs fit()

template <class Model>
Fitted train(Strategy* strategy, const Recipe& run) {
  trains = true;
  auto backend = cpu_backend(1);
  Dataset data = synthetic({.side = 8, .channels = 1, .train = 208, .test = run.test, .seed = 3});
  Loader source(data.train, {.batch = run.batch, .seed = 5, .prefetch = run.prefetch, .transform = run.transform},
                *backend);
  const auto first_is_late = [&](Batch& b) {
    if (b.index == 0) std::this_thread::sleep_for(std::chrono::duration<double>(run.slow));
  };
  Loader test(data.test, {.batch = 16, .shuffle = false, .prefetch = 0, .transform = first_is_late}, *backend);
  Model model;
  SGD sgd(run.sgd);
  sgd.clip_norm = run.clip;
  Strategy one;
  if (strategy) emulate(*strategy, run.stragglers);
  Fitted e;
  const Loss loss = [&](const Variable& logits, const Tensor& labels, Tensor* correct) {
    if (model.training()) std::this_thread::sleep_for(std::chrono::milliseconds(run.milliseconds));
    return cross_entropy_loss()(logits, labels, correct);
  };
  e.report = fit(model, loss, sgd, *backend, {source, nullptr, &test}, run.fit, strategy ? strategy : &one);
  e.weights = parameter_values(model);
  e.buffers = buffer_values(model);
  if (!strategy) return e;
  for (const auto& [name, value] : strategy->end()) e.measures[name] = value;
  return e;
}

template <class Model = Odd>
std::vector<Fitted> on_ranks(int n, ParameterServerOptions options, const Recipe& run = {},
                             const ChannelFaults& faults = {}) {
  if (run.slow == 0) options.deadline = 30;
  auto channels = in_process_channels(n, faults);
  std::vector<Fitted> runs(static_cast<std::size_t>(n));
  all_well(ranks_say(n, [&](int r) {
    auto strategy = parameter_server(std::move(channels[r]), options);
    runs[r] = train<Model>(strategy.get(), run);
  }));
  for (int r = 0; r < n - options.servers; r++) {
    EXPECT_EQ(runs[r].weights, runs[0].weights) << "rank " << r;
    EXPECT_EQ(runs[r].buffers, runs[0].buffers) << "rank " << r;
  }
  return runs;
}
// The exchanges of all workers, without each one's first pull and last.
double pushes(const std::vector<Fitted>& workers) {
  double all = 0;
  for (const Fitted& e : workers) all += e.measures.at("exchanges") - 2;
  return all;
}
ParameterServerOptions by(const std::string& strategy, int servers = 0) {
  return {{.how = Asynchrony::parse(strategy), .servers = servers}};
}

TEST_F(ParameterServer, OneWorkerIsOneMachineToTheBit) {
  run.batch = 17, run.clip = 1;  // the last batch of an epoch is smaller
  const Fitted alone = train<Odd>(nullptr, run);
  Recipe by_rule = run;
  by_rule.clip = 0;
  EXPECT_EQ(on_ranks(1, by("asgd-m:clip=1"), by_rule)[0].weights, alone.weights);
  for (auto [servers, shared] : {std::pair{0, true}, {1, true}, {1, false}, {3, true}, {3, false}})
    for (const char* strategy : {"ddc-asgd", "asp+asgd-m", "dc-asgd-k", "gap-aware", "bsp"}) {
      const auto runs = on_ranks(1 + servers, by(strategy, servers), run, {.shared_memory = shared});
      EXPECT_EQ(runs[0].weights, alone.weights) << strategy << ", " << servers << " servers";
      EXPECT_EQ(runs[0].buffers, alone.buffers);
      EXPECT_EQ(runs[0].report.steps, alone.report.steps);
      EXPECT_EQ(runs[0].report.epochs.back().test_accuracy, alone.report.epochs.back().test_accuracy);
      EXPECT_NEAR(runs[0].report.epochs.back().train_loss, alone.report.epochs.back().train_loss, 1e-9);
      EXPECT_EQ(runs[0].report.epochs.back().train_accuracy, alone.report.epochs.back().train_accuracy);
    }
}

// However late the gradients of threads that share two cores may be. Under a sanitizer it is the threads that are
// tested, in shorter runs, and not what is learned.
bool learned(const Fitted& e) {
  return sanitized() || e.report.epochs.back().train_loss < 0.7 * e.report.epochs.front().train_loss;
}
int epochs(int n) { return sanitized() ? 4 : n; }

// Parts go out while backward computes the rest, where that says what is sent of them.
TEST_F(ParameterServer, PushesWhatIsFinalWhileBackwardGoesOn) {
  run.batch = 17, run.prefetch = 2;
  const Fitted alone = train<Plain>(nullptr, run);
  for (const char* strategy : {"ddc-asgd", "asp+asgd-m", "bsp"})
    for (bool shared : {true, false}) {
      const Fitted e = on_ranks<Plain>(3, by(strategy, 2), run, {.shared_memory = shared})[0];
      EXPECT_EQ(e.weights, alone.weights) << strategy;
      EXPECT_EQ(e.measures.at("early_bytes") > 0, !shared) << strategy;
    }
  EXPECT_TRUE(
      learned(on_ranks<Plain>(3, by("asp+asgd-m"), {.fit = {.epochs = epochs(15), .progress = false}, .prefetch = 2},
                              {.shared_memory = false})[0]));
  run.clip = 1;  // by the norm of the whole
  const Fitted clipped = on_ranks<Plain>(2, by("ddc-asgd", 1), run, {.shared_memory = false})[0];
  EXPECT_EQ(clipped.weights, train<Plain>(nullptr, run).weights);
  EXPECT_EQ(clipped.measures.at("early_bytes"), 0);
}

// A gradient that is not finite where backward ends is in no shard, although the rest of it was there already.
TEST_F(ParameterServer, WhatIsNotFiniteInTheEndIsRefusedAsAWhole) {
  struct Spoiled : Module {  // its first layer's gradient is not finite in one step
    Linear& fc1 = child<Linear>("fc1", 64, 300, true, true);
    Linear& fc2 = child<Linear>("fc2", 300, 300, true, true);
    Linear& fc3 = child<Linear>("fc3", 300, 10);
    int step = 0;
    Variable forward(const Variable& x) override {
      Variable y = flatten(x);
      if (training() && ++step == 5) y = y * Variable(Tensor::full(y.value().backend(), {1}, 1e38));
      return fc3(fc2(fc1(y)));
    }
  };
  run.fit.epochs = 1;
  const Fitted e = on_ranks<Spoiled>(3, by("asp+asgd", 2), run, {.shared_memory = false})[0];
  EXPECT_EQ(e.measures.at("refused"), 1);
  for (double w : e.weights) ASSERT_TRUE(std::isfinite(w));
}

// The batch of the next lease is made in the loader's thread, and each is trained once.
TEST_F(ParameterServer, BatchesAreMadeAhead) {
  for (const char* strategy : {"asgd", "bsp"})
    for (int accumulate : {1, 3}) {
      std::mutex mutex;
      std::set<std::pair<std::int64_t, std::int64_t>> made;
      int ahead = 0;
      Recipe run;
      run.prefetch = 2, run.fit.accumulate = accumulate, run.milliseconds = 4;
      run.transform = [&](Batch& batch) {
        std::lock_guard lock(mutex);
        made.insert({batch.epoch, batch.index});
        ahead += !trains;
      };
      const auto runs = on_ranks<Odd>(2, by(strategy), run);
      EXPECT_EQ(runs[0].report.steps, accumulate == 1 ? 26 : 10);
      EXPECT_EQ(made.size(), 26u) << "two epochs of 13 batches";
      EXPECT_GT(ahead, 13) << strategy;
    }
}

TEST_F(ParameterServer, EveryRankEndsWithTheSameWeightsAndReport) {
  for (const char* strategy : {"ddc-asgd", "asgd", "ssp:1", "dana-slim", "quorum:2,grace=0.005"})
    for (int servers : {0, 1}) {
      const auto runs = on_ranks(3, by(strategy, servers));
      for (const Fitted& e : runs) {
        EXPECT_EQ(e.report.steps, 26) << strategy;
        EXPECT_EQ(e.report.epochs.back().test_accuracy, runs[0].report.epochs.back().test_accuracy);
      }
      EXPECT_EQ(pushes(runs) + 2 * servers, 26);
    }
}

// Rank 0 evaluates for longer than the deadline while the others wait for its gradient, or for its word in the end.
TEST_F(ParameterServer, ASlowEvaluationKillsNobody) {
  for (const std::string how : {"bsp", "ssp:1", "asgd"}) {
    ParameterServerOptions options = by(how);
    std::vector<std::string> told;
    options.deadline = 0.4, options.patience = 0.5,
    options.notify = [&](const std::string& text) { told.push_back(text); };
    const auto runs = on_ranks(3, options, {.slow = 1.2});
    const bool repeats = how == "bsp";
    EXPECT_TRUE(!repeats || runs[0].weights == on_ranks(3, by(how))[0].weights) << "a batch was trained twice, or none";
    const auto warned = std::count_if(told.begin(), told.end(), [](const std::string& t) {
      return t.starts_with("no progress for 0.5 s: rank 0 keeps the others waiting: rank 1 for ");
    });
    EXPECT_GE(warned, how == "bsp" ? 2 : 1) << how;
  }
}

TEST_F(ParameterServer, ItLearns) {
  run.fit.epochs = epochs(15);
  for (const char* strategy : {"ddc-asgd", "ssp:2+asgd-m"})
    EXPECT_TRUE(learned(on_ranks<Plain>(4, by(strategy), run)[0])) << strategy;
  ParameterServerOptions narrow = by("ddc-asgd");
  narrow.wire = DType::bf16;
  for (bool shared : {true, false}) EXPECT_TRUE(learned(on_ranks<Plain>(3, narrow, run, {.shared_memory = shared})[0]));
}

TEST_F(ParameterServer, StopAfterAndAccumulationCountTheStepsOfAll) {
  run.fit.stop_after = 9;
  for (int n : {1, 3}) {
    const auto runs = on_ranks(n, by("ddc-asgd"), run);
    EXPECT_EQ(runs[0].report.steps, 9) << n << " ranks";
    EXPECT_TRUE(runs[0].report.stopped);
  }
  run.fit.stop_after = 0;
  run.fit.accumulate = 3;
  EXPECT_EQ(on_ranks(1, by("ddc-asgd"), run)[0].weights, train<Odd>(nullptr, run).weights);
  EXPECT_EQ(on_ranks(3, by("ddc-asgd"), run)[0].report.steps, 10);
}

TEST_F(ParameterServer, BspHasTheStepsAndRatesOfAllReduceAndOfOneMachine) {
  run.batch = 17;  // no number of ranks here divides it, nor the 4 pictures of an epoch's last batch
  for (const char* schedule : {"one-cycle", "step:1:0.1", "cosine"}) {
    run.fit.schedule = schedule;
    run.fit.accumulate = schedule == std::string("cosine") ? 3 : 1;
    const Fitted alone = train<Plain>(nullptr, run);
    for (int n : {2, 3, 4}) {
      auto ranks = in_process(n, {.deadline = 30});
      std::vector<Fitted> rings(static_cast<std::size_t>(n));
      all_well(ranks_say(n, [&](int r) {
        auto strategy = all_reduce(std::move(ranks[r]), {});
        rings[r] = train<Plain>(strategy.get(), run);
      }));
      const auto runs = on_ranks<Plain>(n, by("bsp"), run);
      EXPECT_EQ(runs[0].report.steps, rings[0].report.steps);
      EXPECT_EQ(runs[0].report.steps, alone.report.steps);
      EXPECT_LT(furthest(runs[0].weights, rings[0].weights), 1e-5) << n << " ranks, " << schedule;
      EXPECT_LT(furthest(runs[0].weights, alone.weights), 1e-5) << n << " ranks, " << schedule;
    }
  }
}

TEST_F(ParameterServer, BspIsAllReduceInDouble) {
  for (int n : {2, 3, 4})
    for (bool shared : {true, false}) {
      const OwnLoop loop{.global_batch = 12 * n, .steps = 20, .ends_epochs = false};
      const StrategyBody trains = [&](Strategy& s, Ended& run) { test::train<Plain>(s, run, loop); };
      auto channels = in_process_channels(n, {.shared_memory = shared});
      const auto server = [&](int r) { return parameter_server(std::move(channels[r]), by("bsp")); };
      const auto rings = test::on_ranks(n, all_reduced(), trains), served = with_strategies(n, server, trains);
      same_bits(served);
      EXPECT_LT(furthest(served[0].weights, rings[0].weights), 1e-12) << n << " ranks";
    }
}

TEST_F(ParameterServer, WhatResumesGoesOn) {
  const TemporaryFolder folder;
  Recipe half, rest;
  half.fit.stop_after = 17;
  half.fit.checkpoint = rest.fit.resume = folder.file("run");
  const Fitted whole = on_ranks(1, by("ddc-asgd"))[0];
  on_ranks(1, by("ddc-asgd"), half);
  EXPECT_EQ(on_ranks(1, by("asp+asgd-m"), rest)[0].weights, whole.weights);  // velocities came along
  EXPECT_EQ(on_ranks(3, by("ddc-asgd"), rest)[0].report.steps, 26);
}

// ---- rounds of a worker's own steps ---------------------------------------------------------------------------------
ParameterServerOptions rounds(const std::string& outer, const std::string& rule) {
  auto options = by(rule);
  options.round = *RoundSteps::parse(outer);
  return options;
}

// Without momentum and with γ = 1 the servers' step goes to where the worker is, whatever its own optimizer.
TEST_F(ParameterServer, RoundsOfOneWorkerAreOneMachine) {
  run.batch = 17, run.clip = 1;
  const Fitted alone = train<Odd>(nullptr, run);
  for (const char* outer : {"outer:H=1,momentum=0,lr=1", "outer:H=5,momentum=0,lr=1", "outer:H=100,momentum=0,lr=1"}) {
    const auto runs = on_ranks(1, rounds(outer, "asgd"), run);
    EXPECT_LE(furthest(runs[0].weights, alone.weights), 2e-6) << outer;  // θ − (θ − x) is rounded
    EXPECT_EQ(runs[0].report.steps, alone.report.steps);
  }
}

// With the rule's momentum it is the outer optimizer of one rank.
TEST_F(ParameterServer, RoundsOfOneWorkerAreTheOuterOptimizer) {
  for (const char* name : {"outer:H=4,momentum=0.9,lr=0.7", "outer:H=100,momentum=0.5,lr=0.7"}) {
    auto synchronous = rounds({alone()}, *RoundSteps::parse(name));
    const Fitted want = train<Plain>(synchronous.get(), {});
    for (const char* rule : {"delayed-nesterov:every=1", "quorum:1+delayed-nesterov:every=1"}) {
      const auto runs = on_ranks<Plain>(1, rounds(name, rule), {});
      EXPECT_LE(furthest(runs[0].weights, want.weights), 1e-5) << name << "+" << rule;
    }
  }
}

TEST_F(ParameterServer, RoundsOfSeveralWorkersTrainEveryBatchOnceAndPushSeldom) {
  const int all = run.fit.epochs = epochs(30);
  std::atomic<std::int64_t> pictures = 0;
  run.transform = [&](Batch& b) { pictures += b.size(); };
  const auto runs = on_ranks<Plain>(3, rounds("outer:H=4,momentum=0.5,lr=0.7", "delayed-nesterov:every=3"), run);
  EXPECT_EQ(pictures, all * 208 + 3 * 16);  // fit() looks at a batch beforehand
  EXPECT_EQ(runs[0].report.steps, all * 13);
  EXPECT_GE(pushes(runs), all * 4);  // 13 steps of an epoch are 4, 4, 4 and 1
  EXPECT_LE(pushes(runs), all * 13 * 2 / 3.);
  EXPECT_TRUE(learned(runs[0]));

  run.fit.stop_after = 31;
  EXPECT_EQ(on_ranks<Plain>(3, rounds("outer:H=4", "delayed-nesterov"), run)[0].report.steps, 31);
}

// Also where gradients travel in half the bytes. One worker is slow.
TEST_F(ParameterServer, AQuorumOfRoundsTrainsEveryBatchOnce) {
  for (bool narrow : {false, true}) {
    Recipe run{.stragglers = {.mean = 0.001, .slower = {{2, 8}}}};
    const int all = run.fit.epochs = epochs(30);
    std::atomic<std::int64_t> pictures = 0;
    run.transform = [&](Batch& b) { pictures += b.size(); };
    auto options = rounds("outer:H=4,momentum=0.5,lr=0.7", "quorum:2,grace=0.005+delayed-nesterov:every=1");
    if (narrow) options.wire = DType::bf16;
    const auto runs = on_ranks<Plain>(3, options, run, {.shared_memory = !narrow});
    EXPECT_EQ(pictures, all * 208 + 3 * 16);  // fit() looks at a batch beforehand
    EXPECT_EQ(runs[0].report.steps, all * 13);
    EXPECT_TRUE(learned(runs[0]));
    EXPECT_LT(runs[0].measures.at("shard_version"), 0.7 * pushes(runs)) << "a step is of several pushes";
  }
}

TEST_F(ParameterServer, TheMomentumOfRoundsIsInTheCheckpoint) {
  const TemporaryFolder folder;
  auto trained = [&](int epochs, const std::string& checkpoint, const std::string& resume) {
    Recipe run;
    run.sgd.momentum = 0;  // the inner one's state is rank 0's
    run.fit.schedule = {};
    run.fit.epochs = epochs, run.fit.checkpoint = checkpoint, run.fit.resume = resume;
    return on_ranks(1, rounds("outer:H=4,momentum=0.9,lr=0.7", "delayed-nesterov:every=1"), run)[0].weights;
  };
  const auto whole = trained(4, "", "");
  trained(2, folder.file("run"), "");
  EXPECT_EQ(trained(4, "", folder.file("run")), whole);
}

TEST_F(ParameterServer, WhatDoesNotGoTogetherIsRefused) {
  auto channels = in_process_channels(2);
  EXPECT_REFUSED(parameter_server(std::move(channels[0]), by("ddc-asgd", 2)), "--servers 2", "must train");
  auto strategy = parameter_server(std::move(in_process_channels(1)[0]), by("ddc-asgd"));
  AdamW adam({});
  auto backend = reference_backend(1);
  Plain model;
  FlatParameters flat(model, *backend, 1);
  EXPECT_REFUSED(strategy->begin(flat, adam), "--optimizer adamw", "ddc-asgd", "Choose --optimizer sgd");
  EXPECT_REFUSED(StragglerEmulation::parse("x", "", 2), "--pace x");
  EXPECT_REFUSED(StragglerEmulation::parse("60", "2:4", 2), "--slow 2:4", "no 2 among 0 to 1");
  EXPECT_REFUSED(StragglerEmulation::parse("60", "0.5:4", 2), "--slow 0.5:4");
  EXPECT_REFUSED(StragglerEmulation::parse("60:1e-310", "", 2), "shape", "0.01");
  EXPECT_REFUSED(StragglerEmulation::parse("", "1:4", 2), "--pace MILLISECONDS");
}

}  // namespace
}  // namespace tandem::test
