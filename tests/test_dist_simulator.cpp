// The simulator: one worker is one machine, all-reduce is a larger batch, and a virtual clock that can be worked out by
// hand.
#include <regex>

#include <numeric>

#include "dist/lab/simulator.h"
#include "dist/server/asynchrony.h"
#include "dist/server/straggler_emulation.h"
#include "tests/training.h"

namespace tandem::test {
namespace {

struct NetWithStatistics : Plain {  // and random numbers
  BatchNorm2d& bn = child<BatchNorm2d>("bn", 1);
  Dropout& dropout = child<Dropout>("dropout", 0.2);
  Variable forward(const Variable& x) override { return fc2(dropout(fc1(flatten(bn(x))))); }
};

struct Trained {
  std::vector<double> weights;
  SimulatorReport report;
};

struct Simulator : testing::Test {
  std::unique_ptr<Backend> backend = cpu_backend(1);
  Dataset data = synthetic({.side = 8, .train = 640, .test = 200, .seed = 3});
  bool statistics = false;  // the network has them
  Trained run(SimulatorOptions options,
              const SGDOptions& sgd = {.learning_rate = 0.05, .momentum = 0.9, .weight_decay = 5e-4},
              std::int64_t batch = 16, const std::function<void(Batch&)>& each = {}) {
    Loader train(data.train, {.batch = batch, .seed = 5, .prefetch = 0, .transform = each}, *backend);
    Loader test(data.test, {.batch = 100, .shuffle = false, .prefetch = 0}, *backend);
    const std::unique_ptr<Plain> model = statistics ? std::make_unique<NetWithStatistics>() : std::make_unique<Plain>();
    Module& net = *model;
    options.progress = false;
    Trained t;
    t.report = simulate(net, cross_entropy_loss(), sgd, *backend, {train, nullptr, &test}, options);
    // The space is gone with the simulation; the model's tensors keep its memory.
    t.weights = parameter_values(net);
    return t;
  }
  std::vector<double> one_machine(std::int64_t batch, double rate, const std::string& schedule = "constant",
                                  bool nesterov = false) {
    Loader train(data.train, {.batch = batch, .seed = 5, .prefetch = 0}, *backend);
    Plain net;
    SGD sgd({.learning_rate = rate, .momentum = 0.9, .nesterov = nesterov, .weight_decay = 5e-4});
    Strategy alone;
    fit(net, cross_entropy_loss(), sgd, *backend, {train, nullptr, nullptr},
        {.epochs = 3, .schedule = schedule, .progress = false}, &alone);
    return parameter_values(net);
  }
};

SimulatorOptions of(const std::string& strategy, int workers) {
  SimulatorOptions o{.strategy = strategy, .epochs = 3};
  o.cluster.workers = workers;
  return o;
}

TEST_F(Simulator, OneWorkerIsOneMachine) {
  for (const char* schedule : {"constant", "step:1:0.1"}) {
    SimulatorOptions o = of("ddc-asgd", 1);
    o.schedule = Schedule::parse(schedule);
    EXPECT_EQ(run(o).weights, one_machine(16, 0.05, schedule)) << schedule;
  }
}

TEST_F(Simulator, AllReduceIsALargerBatch) {
  const auto wanted = one_machine(64, 0.05);
  for (const char* same :
       {"all-reduce", "bsp", "quorum:4", "local-sgd:1", "post-local-sgd:1", "outer:H=1,momentum=0,lr=1"}) {
    EXPECT_LT(largest_gap(run(of(same, 4)).weights, wanted), 2e-6) << same;
  }
}

// One worker's steps, one by one through the outer optimizer, are Nesterov's.
TEST_F(Simulator, AnOuterStepIsNesterovs) {
  const auto wanted = one_machine(16, 0.05, "constant", true),
             got =
                 run(of("outer:H=1,momentum=0.9,lr=1", 1), {.learning_rate = 0.05, .momentum = 0, .weight_decay = 5e-4})
                     .weights;
  EXPECT_LE(largest_gap(got, wanted), 2e-5);
  EXPECT_NE(run(of("outer:H=4", 4)).weights, run(of("local-sgd:4", 4)).weights);
}

TEST_F(Simulator, EndsWhereItsTargetIsReached) {
  SimulatorOptions o = of("asgd-m", 4);
  const auto whole = run(o).report;
  o.until = *whole.evaluations[1].test_accuracy, o.evaluate_every = 1;
  const auto ended = run(o).report;
  EXPECT_TRUE(ended.reached);
  EXPECT_FALSE(whole.reached);
  ASSERT_LE(ended.evaluations.size(), 2u);
  EXPECT_EQ(ended.evaluations.back().test_accuracy, whole.evaluations[ended.evaluations.size() - 1].test_accuracy);
}

TEST_F(Simulator, RepeatsToTheBit) {
  statistics = true;
  for (const char* strategy : {"ddc-asgd", "ssp:1", "quorum:3,grace=0.02", "easgd:4", "cocod-sgd:4", "local-sgd:4"}) {
    const Trained a = run(of(strategy, 5)), b = run(of(strategy, 5));
    EXPECT_EQ(a.weights, b.weights) << strategy;
    EXPECT_EQ(a.report.seconds, b.report.seconds);
    ASSERT_EQ(a.report.epochs.size(), 3u) << strategy;
    EXPECT_LT(a.report.epochs.back().train_loss, a.report.epochs.front().train_loss) << strategy;
    EXPECT_FALSE(a.report.diverged);
  }
}

// Steps of exactly 1 s: the clock is arithmetic.
TEST_F(Simulator, VirtualTime) {
  SimulatorOptions o = of("asgd", 4);
  o.cluster.compute = 1, o.cluster.shape = 0;
  Trained t = run(o);  // 120 batches by 4 workers
  EXPECT_DOUBLE_EQ(t.report.seconds, 30);
  // In the first round τ = 0, 1, 2, 3; afterwards everybody's gradient is 3 late.
  EXPECT_EQ(t.report.delays, (std::vector<std::int64_t>{1, 1, 1, 117}));

  o.cluster.slower[0] = 4;  // the others make 4 steps to its one: 13 in 4 s
  t = run(o);
  EXPECT_NEAR(t.report.seconds, 120 / 13.0 * 4, 4);
  o.strategy = "bsp";  // all wait for it
  EXPECT_DOUBLE_EQ(run(o).report.seconds, 120);
  o.strategy = "ssp:2";  // and here nearly
  EXPECT_NEAR(run(o).report.seconds, 120, 8);
  // The three others wait a quarter of a second in three of four steps. In the fourth it is there before them: 13
  // batches in 4.75 s.
  o.strategy = "quorum:3,grace=0.25";
  EXPECT_NEAR(run(o).report.seconds, 120 / 13.0 * 4.75, 4);

  // 2 · 3/4 of the vector in, 1.5 MB/s: a vector of n bytes takes n · 2 · 3/4 / 1.5e6 s, and 6 latencies by ring.
  o = of("all-reduce", 4);
  o.cluster.compute = 1, o.cluster.shape = 0, o.cluster.latency = 0.01, o.cluster.bandwidth = 1.5e6;
  Plain net;
  FlatParameters flat(net, *backend, 1);
  const double bytes = double(flat.numel()) * 4;
  EXPECT_NEAR(run(o).report.seconds, 30 + 29 * (0.04 + bytes * 1.5 / 1.5e6), 1e-6);
  o.strategy = "asgd";  // there and back: two latencies, and 3/4 of the vector each way
  EXPECT_NEAR(run(o).report.seconds, 30 + (29 + 30) * (0.01 + bytes * 0.75 / 1.5e6), 1e-6);
}

// A step of worker 1 takes as long as two and a half of worker 0's, and is dropped where two of these are between.
TEST_F(Simulator, WhatIsDroppedIsTrainedAgain) {
  SimulatorOptions o = of("ringmaster:R=2", 2);
  o.cluster.compute = 1, o.cluster.shape = 0, o.cluster.slower[1] = 2.5;
  const SimulatorReport r = run(o).report;
  EXPECT_EQ(r.delays, std::vector<std::int64_t>{120});
  EXPECT_EQ(r.dropped, 48);  // at 2.5 s, 5 s, …, 120 s; worker 0 has trained all other 119 batches by then
  EXPECT_DOUBLE_EQ(r.seconds, 122.5);
  EXPECT_DOUBLE_EQ(r.participation, 120 / 168.0);

  // Batches, by epoch and pixels
  const auto trained = [&](const std::string& strategy, int workers, SimulatorReport& report) {
    SimulatorOptions slow = of(strategy, workers);
    if (workers > 1) slow.cluster.slower[1] = 4;
    std::multiset<std::pair<std::int64_t, std::vector<double>>> batches;
    report = run(slow, {.learning_rate = 0.05}, 16, [&](Batch& batch) {
               batches.insert({batch.epoch, batch.images.values()});
             }).report;
    return batches;
  };
  SimulatorReport s;
  const auto once = trained("asgd", 1, s);
  EXPECT_EQ(once.size(), 120u);
  for (const char* strategy : {"ringmaster:R=1", "rennala:B=3", "fedbuff:B=7"}) {
    EXPECT_TRUE(trained(strategy, 5, s) == once) << strategy;
    EXPECT_EQ(std::accumulate(s.delays.begin(), s.delays.end(), std::int64_t{0}), 120) << strategy;
    EXPECT_EQ(s.epochs.size(), 3u) << strategy;
    EXPECT_EQ(s.dropped > 0, strategy[0] == 'r') << strategy;
    EXPECT_LT(s.epochs.back().train_loss, s.epochs.front().train_loss) << strategy;
  }
}

TEST_F(Simulator, WithOneWorkerNothingIsDropped) {
  const auto plain = run(of("asgd", 1)).weights;
  for (const char* same : {"ringmaster:R=1", "fedbuff:B=1", "rennala:B=1", "delay-adaptive", "rescaled", "sa-asgd"})
    EXPECT_EQ(run(of(same, 1)).weights, plain) << same;
}

TEST_F(Simulator, StepTimesHaveTheMeanAndTheSpreadThatWereAskedFor) {
  SimulatorOptions o = of("asgd", 1);
  o.epochs = 20;  // 800 steps
  o.cluster.compute = 1, o.cluster.shape = 4;
  const SimulatorReport r = run(o).report;
  EXPECT_NEAR(r.seconds / 800, 1, 4 * 0.5 / std::sqrt(800));
  double squares = 0;
  for (const auto& e : r.epochs) squares += (e.seconds - 40) * (e.seconds - 40);
  EXPECT_NEAR(std::sqrt(squares / 20), std::sqrt(40) * 0.5, 1.6);  // an epoch is 40 steps of standard deviation 1/√4
}

// One step from the whole training set: it is as long as the learning rate times the norm.
TEST_F(Simulator, EveryPushIsClippedByTheNormOfTheWhole) {
  for (const char* strategy : {"asgd", "ddc-asgd", "bsp+asgd", "fedbuff:B=1+asgd"}) {
    const auto moved = [&](const std::string& clip, double rate) {
      SimulatorOptions o = of(strategy + clip, 1);
      o.epochs = 1;
      return run(o, {.learning_rate = rate, .momentum = 0.9}, 640).weights;
    };
    const auto first = moved("", 1e-20), clipped = moved(":clip=0.125", 1), large = moved(":clip=1000", 1);
    double squares = 0;
    for (std::size_t i = 0; i < first.size(); i++) squares += (clipped[i] - first[i]) * (clipped[i] - first[i]);
    EXPECT_NEAR(std::sqrt(squares), 0.125, 1e-6) << strategy;
    EXPECT_EQ(large, moved("", 1)) << strategy;
  }
}

TEST_F(Simulator, WhatDivergesIsEndedAndSaid) {
  const SimulatorReport r = run(of("asgd-m", 8), {.learning_rate = 1e6, .momentum = 0.9}).report;
  EXPECT_TRUE(r.diverged);
  EXPECT_GE(r.refused, 20);
}

TEST_F(Simulator, ThousandWorkers) {
  SimulatorOptions o = of("ddc-asgd", 1000);
  o.epochs = 30;  // 1200 steps
  const SimulatorReport r = run(o, {.learning_rate = 0.001, .momentum = 0.9}).report;
  EXPECT_EQ(std::accumulate(r.delays.begin(), r.delays.end(), std::int64_t{0}), 1200);
}

TEST_F(Simulator, MoreWorkersThanTheMemoryHoldsAreRefused) {
  EXPECT_REFUSED(run(of("ddc-asgd", 1'000'000'000)), "1000000000 workers with ddc-asgd keep ",
                 "3 vectors of 2410 parameters each");
}

TEST_F(Simulator, StrategiesAreChecked) {
  auto said = [&](const std::string& strategy) { return error_of<UsageError>([&] { run(of(strategy, 2)); }); };
  EXPECT_TRUE(holds(said("ssp"), {"write ssp:steps=NUMBER"}));
  EXPECT_TRUE(holds(said("ssp:x"), {"steps is a whole number"}));
  EXPECT_TRUE(holds(said("bsp+ddc-asgd"), {"nothing is late"}));
  EXPECT_TRUE(holds(said("easgd:0"), {"H is STEPS, from 1"}));
  EXPECT_TRUE(holds(said("sgd"), {"the simulator has no strategy 'sgd': choose all-reduce"}));
  EXPECT_EQ(said("ssp:3+dana-slim"), "");
  for (const char* wrong :
       {"quorum", "quorum:", "quorum:0", "quorum:2,grace", "quorum:2,grace=", "quorum:2,grace=-1", "quorum:2,3"})
    EXPECT_TRUE(std::regex_search(said(wrong), std::regex("workers=|workers is a|grace is a"))) << wrong;
  for (const char* wrong : {"ringmaster", "ringmaster:R=0", "ringmaster:B=2", "ringmaster:R=2,B=2"})
    EXPECT_TRUE(std::regex_search(said(wrong), std::regex("R=$|R=NUMBER|R is a"))) << wrong;
  for (const char* wrong : {"fedbuff", "fedbuff:B=0", "fedbuff:B=x", "rennala:R=2", "rennala:B=-1"})
    EXPECT_TRUE(std::regex_search(said(wrong), std::regex("B=$|B=NUMBER|B is a"))) << wrong;
  for (const char* wrong : {"fedbuff:B=2+ddc-asgd", "rennala:B=2+dana-slim"})
    EXPECT_TRUE(holds(said(wrong), {"one for all workers"})) << wrong;
  EXPECT_EQ(said("ringmaster:R=3+ddc-asgd"), "");
  for (const char* text : {"ringmaster:R=3+ddc-asgd", "fedbuff:B=4+asgd", "rennala:B=2+asgd-m"})
    EXPECT_EQ(Asynchrony::parse(text).text(), text);
  EXPECT_EQ(Asynchrony::parse("fedbuff:B=4").text(), "fedbuff:B=4+asgd");
  EXPECT_TRUE(holds(said("quorum:2+ddc-asgd"), {"one for all workers"}));
  SimulatorOptions endless = of("asgd", 2);
  endless.cluster.shape = 1e-310;
  EXPECT_REFUSED(check_simulation(endless), "shape", "0.01");
  endless.cluster.shape = 100, endless.cluster.bandwidth = 1e-320;
  EXPECT_REFUSED(check_simulation(endless), "bytes a second");
  for (const char* text : {"ssp:3", "asp"}) EXPECT_EQ(Asynchrony::parse(text).rule, "ddc-asgd") << text;
  EXPECT_EQ(Asynchrony::parse("ssp:3").text(), "ssp:3+ddc-asgd");
  EXPECT_EQ(Asynchrony::parse("bsp").rule, "asgd-m");
  EXPECT_EQ(Asynchrony::parse("quorum:2").text(), "quorum:2,grace=1+asgd-m");
  EXPECT_EQ(Asynchrony::parse("quorum:2,grace=0.25+asgd").text(), "quorum:2,grace=0.25+asgd");
  const Asynchrony a = Asynchrony::parse("ssp:3+ddc-asgd:lambda=1");
  EXPECT_EQ(a.staleness, 3);
  EXPECT_EQ(a.rule, "ddc-asgd:lambda=1");
}

// ---- evaluations ----------------------------------------------------------------------------------------------------
TEST_F(Simulator, EvaluationsAreWhereTheyWereAskedForAndChangeNothing) {
  SimulatorOptions o = of("ddc-asgd", 4);
  const Trained each = run(o);
  ASSERT_EQ(each.report.evaluations.size(), 3u);
  o.evaluate_every = 0.25;
  const Trained often = run(o);
  EXPECT_EQ(often.weights, each.weights);
  ASSERT_EQ(often.report.evaluations.size(), 12u);
  for (std::size_t e = 0; e < 12; e++) EXPECT_DOUBLE_EQ(often.report.evaluations[e].epoch, 0.25 * double(e + 1));
  for (std::size_t e = 0; e < 3; e++) {
    EXPECT_EQ(json_object(fields_of(often.report.epochs[e])), json_object(fields_of(each.report.epochs[e])));
    EXPECT_EQ(often.report.evaluations[4 * e + 3].test_accuracy, each.report.epochs[e].test_accuracy);
    EXPECT_EQ(often.report.evaluations[4 * e + 3].seconds, each.report.evaluations[e].seconds);
    EXPECT_FALSE(often.report.evaluations[e].validation_accuracy);
  }
  EXPECT_EQ(often.report.evaluations.back().seconds, often.report.seconds);

  o.evaluate_every = 2;  // after epoch 2, and at the end
  const Trained seldom = run(o);
  EXPECT_EQ(seldom.weights, each.weights);
  ASSERT_EQ(seldom.report.evaluations.size(), 2u);
  EXPECT_DOUBLE_EQ(seldom.report.evaluations[0].epoch, 2);
  EXPECT_DOUBLE_EQ(seldom.report.evaluations[1].epoch, 3);
  EXPECT_FALSE(seldom.report.epochs[0].test_accuracy);
  EXPECT_EQ(seldom.report.epochs[1].test_accuracy, each.report.epochs[1].test_accuracy);
  EXPECT_EQ(seldom.report.epochs[2].test_accuracy, each.report.epochs[2].test_accuracy);
  for (const double wrong : {0.0, -1.0, double(NAN)}) {
    o.evaluate_every = wrong;
    EXPECT_REFUSED(check_simulation(o), "evaluation every", "above 0");
  }
}

TEST_F(Simulator, HalfOfTheWorkersAreSlow) {
  EXPECT_EQ(parse_slower("half:4", 5), (std::map<int, double>{{3, 4}, {4, 4}}));
  EXPECT_EQ(parse_slower("half:4,3:2", 4), (std::map<int, double>{{2, 4}, {3, 2}}));
  EXPECT_TRUE(parse_slower("half:4", 1).empty());
  EXPECT_REFUSED(parse_slower("half:x", 4), "--slow half:x");
  EXPECT_REFUSED(parse_slower("half", 4), "half:FACTOR");
  const Parts parts{.pictures = {{5, 0, 1}, {0, 5, 5}}};
  EXPECT_EQ(parse_slower("classes:1-2:3", 2, parts), (std::map<int, double>{{1, 3}}));
  EXPECT_EQ(parse_slower("classes:0-0,1:2", 2, parts), (std::map<int, double>{{0, 4}, {1, 2}}));
  for (const char* form : {"classes:0-1:2:3", "classes:0", "classes:0-1x", "classes:"})
    EXPECT_REFUSED(parse_slower(form, 2, parts), "classes:FIRST-LAST");
  for (const char* range : {"classes:1-3", "classes:2-1:4"})
    EXPECT_REFUSED(parse_slower(range, 2, parts), "there are classes 0 to 2");
  EXPECT_REFUSED(parse_slower("classes:0-1:x", 2, parts), "0.001");
  EXPECT_REFUSED(parse_slower("classes:0-1", 2), "--partition");
}

}  // namespace
}  // namespace tandem::test
