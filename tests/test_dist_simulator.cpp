// The simulator: one worker is one machine, all-reduce is a larger batch, and a virtual clock that can be worked out by hand.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "datasets/loader.h"
#include "datasets/synthetic.h"
#include "dist/server/asynchrony.h"
#include "dist/lab/simulator.h"
#include "layers/layers.h"
#include "tests/support.h"

namespace tandem::test {
namespace {

struct Net : Module {
  Linear& fc1 = child<Linear>("fc1", 64, 32, true, true);
  Linear& fc2 = child<Linear>("fc2", 32, 10);
  Variable forward(const Variable& x) override { return fc2(fc1(flatten(x))); }
};

struct Trained {
  std::vector<double> weights;
  SimulatorReport report;
};

struct Bench {
  std::unique_ptr<Backend> backend = cpu_backend(1);
  Dataset data = synthetic({.side = 8, .train = 640, .test = 200, .seed = 3});
  std::vector<double> weights_of(Module& model) {
    std::vector<double> all;
    for (auto& [name, p] : model.parameters())
      for (double v : p->variable.value().values()) all.push_back(v);
    return all;
  }
  Trained run(SimulatorOptions options,
              const SGDOptions& sgd = {.learning_rate = 0.05, .momentum = 0.9, .weight_decay = 5e-4},
              std::int64_t batch = 16) {
    Loader train(data.train, {.batch = batch, .seed = 5, .prefetch = 0}, *backend);
    Loader test(data.test, {.batch = 100, .shuffle = false, .prefetch = 0}, *backend);
    Net net;
    options.progress = false;
    Trained t;
    t.report = simulate(net, cross_entropy_loss(), sgd, *backend, {train, nullptr, &test}, options);
    // The space is gone with the simulation; the model's tensors keep its memory.
    t.weights = weights_of(net);
    return t;
  }
  std::vector<double> one_machine(std::int64_t batch, double rate, const std::string& schedule = "constant") {
    Loader train(data.train, {.batch = batch, .seed = 5, .prefetch = 0}, *backend);
    Net net;
    SGD sgd({.learning_rate = rate, .momentum = 0.9, .weight_decay = 5e-4});
    Strategy alone;
    fit(net, cross_entropy_loss(), sgd, *backend, {train, nullptr, nullptr},
        {.epochs = 3, .schedule = Schedule::parse(schedule), .progress = false}, &alone);
    return weights_of(net);
  }
};

SimulatorOptions of(const std::string& strategy, int workers) {
  SimulatorOptions o{.strategy = strategy, .epochs = 3};
  o.cluster.workers = workers;
  return o;
}

TEST(Simulator, OneWorkerIsOneMachine) {
  Bench bench;
  for (const char* schedule : {"constant", "step:1:0.1"}) {
    SimulatorOptions o = of("ddc-asgd", 1);
    o.schedule = Schedule::parse(schedule);
    EXPECT_EQ(bench.run(o).weights, bench.one_machine(16, 0.05, schedule)) << schedule;
  }
}

TEST(Simulator, AllReduceIsALargerBatch) {
  Bench bench;
  const auto wanted = bench.one_machine(64, 0.05);
  for (const char* same : {"all-reduce", "bsp", "quorum:4", "local-sgd:1", "post-local-sgd:1"}) {
    const auto got = bench.run(of(same, 4)).weights;
    ASSERT_EQ(got.size(), wanted.size());
    double most = 0;
    for (std::size_t i = 0; i < got.size(); i++) most = std::max(most, std::abs(got[i] - wanted[i]));
    EXPECT_LT(most, 2e-6) << same;
  }
}

TEST(Simulator, RepeatsToTheBit) {
  Bench bench;
  for (const char* strategy : {"ddc-asgd", "ssp:1", "quorum:3,grace=0.02", "easgd:4", "cocod-sgd:4", "local-sgd:4"}) {
    const Trained a = bench.run(of(strategy, 5)), b = bench.run(of(strategy, 5));
    EXPECT_EQ(a.weights, b.weights) << strategy;
    EXPECT_EQ(a.report.seconds, b.report.seconds);
    ASSERT_EQ(a.report.epochs.size(), 3u) << strategy;
    EXPECT_LT(a.report.epochs.back().train_loss, a.report.epochs.front().train_loss) << strategy;
    EXPECT_FALSE(a.report.diverged);
  }
}

// Steps of exactly 1 s: the clock is arithmetic.
TEST(Simulator, VirtualTime) {
  Bench bench;
  SimulatorOptions o = of("asgd", 4);
  o.cluster.compute = 1, o.cluster.shape = 0;
  Trained t = bench.run(o);  // 120 batches by 4 workers
  EXPECT_DOUBLE_EQ(t.report.seconds, 30);
  // In the first round τ = 0, 1, 2, 3; afterwards everybody's gradient is 3 late.
  EXPECT_EQ(t.report.delays, (std::vector<std::int64_t>{1, 1, 1, 117}));

  o.cluster.slower[0] = 4;  // the others make 4 steps to its one: 13 in 4 s
  t = bench.run(o);
  EXPECT_NEAR(t.report.seconds, 120 / 13.0 * 4, 4);
  o.strategy = "bsp";  // all wait for it
  EXPECT_DOUBLE_EQ(bench.run(o).report.seconds, 120);
  o.strategy = "ssp:2";  // and here nearly
  EXPECT_NEAR(bench.run(o).report.seconds, 120, 8);
  // The three others wait a quarter of a second in three of four steps. In the fourth it is there before them: 13 batches in 4.75 s.
  o.strategy = "quorum:3,grace=0.25";
  EXPECT_NEAR(bench.run(o).report.seconds, 120 / 13.0 * 4.75, 4);

  // 2 · 3/4 of the vector in, 1.5 MB/s: a vector of n bytes takes n · 2 · 3/4 / 1.5e6 s, and 6 latencies by ring.
  o = of("all-reduce", 4);
  o.cluster.compute = 1, o.cluster.shape = 0, o.cluster.latency = 0.01, o.cluster.bandwidth = 1.5e6;
  Net net;
  FlatParameters flat(net, *bench.backend, 1);
  const double bytes = double(flat.numel()) * 4;
  EXPECT_NEAR(bench.run(o).report.seconds, 30 + 29 * (0.06 + bytes * 1.5 / 1.5e6), 1e-6);
  o.strategy = "asgd";  // there and back: two latencies, and 3/4 of the vector each way
  EXPECT_NEAR(bench.run(o).report.seconds, 30 + (29 + 30) * (0.01 + bytes * 0.75 / 1.5e6), 1e-6);
}

TEST(Simulator, StepTimesHaveTheMeanAndTheSpreadThatWereAskedFor) {
  Bench bench;
  SimulatorOptions o = of("asgd", 1);
  o.epochs = 20;  // 800 steps
  o.cluster.compute = 1, o.cluster.shape = 4;
  const SimulatorReport r = bench.run(o).report;
  EXPECT_NEAR(r.seconds / 800, 1, 4 * 0.5 / std::sqrt(800));
  double squares = 0;
  for (const auto& e : r.epochs) squares += (e.seconds - 40) * (e.seconds - 40);
  EXPECT_NEAR(std::sqrt(squares / 20), std::sqrt(40) * 0.5, 1.6);  // an epoch is 40 steps of standard deviation 1/√4
}

TEST(Simulator, WhatDivergesIsEndedAndSaid) {
  Bench bench;
  const SimulatorReport r = bench.run(of("asgd-m", 8), {.learning_rate = 1e6, .momentum = 0.9}).report;
  EXPECT_TRUE(r.diverged);
  EXPECT_GE(r.refused, 20);
}

TEST(Simulator, ThousandWorkers) {
  Bench bench;
  SimulatorOptions o = of("ddc-asgd", 1000);
  o.epochs = 30;  // 1200 steps
  const SimulatorReport r = bench.run(o, {.learning_rate = 0.001, .momentum = 0.9}).report;
  EXPECT_EQ(std::accumulate(r.delays.begin(), r.delays.end(), std::int64_t{0}), 1200);
}

TEST(Simulator, MoreWorkersThanTheMemoryHoldsAreRefused) {
  Bench bench;
  try {
    bench.run(of("ddc-asgd", 1'000'000'000));
    FAIL();
  } catch (const UsageError& e) {
    EXPECT_NE(std::string(e.what()).find("1000000000 workers with ddc-asgd keep "), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find("3 vectors of 2410 parameters each"), std::string::npos) << e.what();
  }
}

TEST(Simulator, StrategiesAreChecked) {
  Bench bench;
  auto said = [&](const std::string& strategy) {
    try {
      bench.run(of(strategy, 2));
    } catch (const UsageError& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  EXPECT_NE(said("ssp").find("ssp:STEPS"), std::string::npos);
  EXPECT_NE(said("ssp:x").find("ssp:STEPS"), std::string::npos);
  EXPECT_NE(said("bsp+ddc-asgd").find("nothing is late"), std::string::npos);
  EXPECT_NE(said("easgd:0").find("easgd:STEPS"), std::string::npos);
  EXPECT_NE(said("sgd").find("there is no update rule sgd"), std::string::npos);
  EXPECT_EQ(said("ssp:3+dana-slim"), "");
  for (const char* wrong : {"quorum", "quorum:", "quorum:0", "quorum:2,grace", "quorum:2,grace=", "quorum:2,grace=-1", "quorum:2,3"})
    EXPECT_NE(said(wrong).find("write quorum:WORKERS"), std::string::npos) << wrong;
  EXPECT_NE(said("quorum:2+ddc-asgd").find("one for all workers"), std::string::npos);
  SimulatorOptions endless = of("asgd", 2);
  endless.cluster.shape = 1e-310;
  EXPECT_TRUE(refused([&] { check_simulation(endless); }, {"shape", "0.01"}));
  endless.cluster.shape = 100, endless.cluster.bandwidth = 1e-320;
  EXPECT_TRUE(refused([&] { check_simulation(endless); }, {"bytes a second"}));
  for (const char* text : {"ssp:3", "asp"}) EXPECT_EQ(Asynchrony::parse(text).rule, "ddc-asgd") << text;
  EXPECT_EQ(Asynchrony::parse("ssp:3").text(), "ssp:3+ddc-asgd");
  EXPECT_EQ(Asynchrony::parse("bsp").rule, "asgd-m");
  EXPECT_EQ(Asynchrony::parse("quorum:2").text(), "quorum:2,grace=1+asgd-m");
  EXPECT_EQ(Asynchrony::parse("quorum:2,grace=0.25+asgd").text(), "quorum:2,grace=0.25+asgd");
  const Asynchrony a = Asynchrony::parse("ssp:3+ddc-asgd:lambda=1");
  EXPECT_EQ(a.staleness, 3);
  EXPECT_EQ(a.rule, "ddc-asgd:lambda=1");
}

}  // namespace
}  // namespace tandem::test
