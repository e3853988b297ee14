// PowerSGD: what does not travel waits; at full rank nothing waits; training with it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "dist/strategies/all_reduce.h"
#include "dist/strategies/power_sgd.h"
#include "tests/dumps.h"
#include "tests/replicas.h"

namespace tandem::test {
namespace {

constexpr std::int64_t length = 200;
// Two matrices with elements before, between and behind them: 100 × 1 would be no shorter.
const std::vector<PowerSgd::Matrix> matrices{{3, 6, 12}, {80, 14, 7}};

std::vector<float> gradient(int rank, int step) {
  std::vector<float> g;
  for (double v : numbers("g" + std::to_string(rank) + "/" + std::to_string(step), length)) g.push_back(float(v));
  return g;
}

// What each rank has after `steps` exchanges: the sum of all results, and what waits.
struct Summed {
  std::vector<double> results = std::vector<double>(length), given = results;
  std::vector<std::vector<float>> last;
};
std::vector<Summed> exchanged(int n, std::int64_t rank, int steps, const std::vector<bool>& made = {}) {
  auto ranks = in_process(n, {.deadline = 30});
  std::vector<Summed> all(static_cast<std::size_t>(n));
  all_well(ranks_say(n, [&](int r) {
    PowerSgd power(rank, matrices, length);
    Summed& mine = all[std::size_t(r)];
    for (int step = 0; step < steps; step++) {
      std::vector<float> g = gradient(r, step), given = g;
      power.begin(*ranks[std::size_t(r)], g.data()).wait();
      power.end(g.data());
      const bool counts = made.empty() || made[std::size_t(step)];
      power.finish_step(counts);
      for (std::size_t i = 0; counts && i < g.size(); i++) mine.results[i] += g[i], mine.given[i] += given[i];
      mine.last = {g, power.residual()};
    }
  }));
  for (const Summed& s : all) EXPECT_TRUE(s.last[0] == all[0].last[0]) << "ranks have different sums";
  return all;
}

TEST(PowerSgd, AtFullRankItIsTheSum) {
  for (int n : {1, 2, 3}) {
    const auto all = exchanged(n, 100, 1);
    for (std::size_t i = 0; i < std::size_t(length); i++) {
      double want = 0;
      for (const Summed& s : all) want += s.given[i];
      ASSERT_NEAR(all[0].results[i], want, 2e-6) << n << " ranks, element " << i;
    }
  }
}

TEST(PowerSgd, WhatDoesNotTravelWaits) {
  for (int n : {1, 2, 3}) {
    const auto all = exchanged(n, 2, 20, std::vector<bool>{1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0});
    double waits_somewhere = 0;
    for (std::size_t i = 0; i < std::size_t(length); i++) {
      double given = 0, waits = 0;
      for (const Summed& s : all) given += s.given[i], waits += s.last[1][i];
      ASSERT_NEAR(all[0].results[i] + waits, given, 2e-4) << n << " ranks, element " << i;
      waits_somewhere += std::abs(waits);
    }
    EXPECT_GT(waits_somewhere, 1) << n << " ranks";
    for (std::size_t i : {0, 2, 75, 79, 178, 199}) EXPECT_EQ(all[0].last[1][i], 0) << "no matrix has element " << i;
  }
}

TEST(PowerSgd, ARankOneMatrixTravelsAsOne) {
  PowerSgd power(1, {{0, 5, 8}}, 40);
  auto ranks = in_process(1);
  for (int step = 0; step < 2; step++) {  // the second: zeros, of which nothing is left
    std::vector<float> g(40);
    for (std::size_t i = 0; i < 40; i++) g[i] = step == 0 ? float(i / 8 + 1) * float(int(i % 8) - 3) : 0;
    const std::vector<float> given = g;
    power.begin(*ranks[0], g.data()).wait();
    power.end(g.data());
    power.finish_step(true);
    for (std::size_t i = 0; i < 40; i++) ASSERT_NEAR(g[i], given[i], 1e-5) << i;
  }
}

TEST(PowerSgd, NaNArrives) {
  PowerSgd power(2, matrices, length);
  auto ranks = in_process(1);
  std::vector<float> g = gradient(0, 0);
  g[10] = std::nanf("");
  power.begin(*ranks[0], g.data()).wait();
  power.end(g.data());
  EXPECT_TRUE(std::any_of(g.begin(), g.end(), [](float v) { return std::isnan(v); }));
  power.finish_step(false);
  for (float v : power.residual()) EXPECT_EQ(v, 0);
}

// Three layers, f32, 40 steps.
struct Wide : Module {
  Linear& fc1 = child<Linear>("fc1", 64, 64, true, true);
  Linear& fc2 = child<Linear>("fc2", 64, 48, true, true);
  Linear& fc3 = child<Linear>("fc3", 48, 10);
  Variable forward(const Variable& x) override { return fc3(fc2(fc1(flatten(x)))); }
};
struct Trained {
  std::vector<double> weights, losses;
  double bytes = 0;
};
Trained trained(int n, const AllReduceOptions& options) {
  auto ranks = in_process(n, {.deadline = 30});
  std::vector<Trained> runs(static_cast<std::size_t>(n));
  all_well(ranks_say(n, [&](int r) {
    Trained& run = runs[std::size_t(r)];
    auto strategy = all_reduce(std::move(ranks[std::size_t(r)]), options);
    auto backend = reference_backend(1);
    Wide model;
    FlatParameters flat(model, *backend, 1);
    SGD sgd({.learning_rate = 0.05, .momentum = 0.9});
    sgd.bind(flat);
    strategy->begin(flat, sgd);
    const Tensor x = Tensor::of(*backend, {8, 8, 8, 1}, numbers("x" + std::to_string(r), 512));
    const Tensor y = Tensor::of(*backend, {8}, {0, 1, 2, 3, 4, 5, 6, 7}, DType::i32);
    for (int i = 0; i < 40; i++) {
      flat.zero_gradients();
      Variable loss = cross_entropy(model(Variable(x)), y);
      flat.backward(loss, 1.0 / n);
      strategy->step(sgd, loss);
      run.losses.push_back(loss.item());
    }
    for (const auto& [name, value] : strategy->end())
      if (name == "sent_bytes") run.bytes = value;
    run.weights = flat.values.values();
  }));
  for (const Trained& run : runs) EXPECT_TRUE(run.weights == runs[0].weights);
  return runs[0];
}

TEST(PowerSgd, RanksTrainAlike) {
  for (int n : {2, 3}) {
    const Trained dense = trained(n, {.bucket_bytes = 4096}),
                  whole = trained(n, {.bucket_bytes = 4096, .power_sgd = 64}),
                  thin = trained(n, {.bucket_bytes = 4096, .power_sgd = 2});
    EXPECT_LE(difference(whole.weights, dense.weights).error, 1e-6);  // no product is shorter than its matrix
    EXPECT_GT(difference(thin.weights, dense.weights).error, 1e-4);
    EXPECT_LT(thin.losses.back(), thin.losses.front() / 2) << "it does not learn";
    EXPECT_LT(thin.bytes, 0.4 * dense.bytes) << n << " ranks";
  }
}

TEST(PowerSgd, ARankThatIsNoneIsRefused) {
  for (std::int64_t rank : {0, -1}) EXPECT_THROW(PowerSgd(rank, {}, 10), Error) << rank;
  auto alone_here = in_process(1);
  auto strategy = all_reduce(std::move(alone_here[0]), {.power_sgd = 2});
  auto backend = reference_backend(1);
  Wide model;
  FlatParameters flat(model, *backend, 1, {}, DType::f64);
  SGD sgd({.learning_rate = 0.05});
  sgd.bind(flat);
  EXPECT_TRUE(refused([&] { strategy->begin(flat, sgd); }, {"TANDEM_WIRE=powersgd", "f32"}));
}

}  // namespace
}  // namespace tandem::test
