// Only the largest gradients travel, the rest waits: nothing is lost, all ranks agree to the bit.
#include <gtest/gtest.h>

#include <cmath>

#include "core/backend.h"
#include "dist/collectives/in_process.h"
#include "dist/strategies/all_reduce.h"
#include "dist/strategies/top_k.h"
#include "layers/layers.h"
#include "tests/ranks.h"
#include "tests/support.h"

namespace tandem::test {
namespace {

// Whole numbers, so that sums are exact in any order.
std::vector<float> gradients(int step, int rank, std::size_t n) {
  std::vector<float> g;
  for (double v : numbers("g" + std::to_string(step) + "," + std::to_string(rank), std::int64_t(n), -1000, 1000))
    g.push_back(float(std::round(v)));
  return g;
}

TEST(TopK, WhatDoesNotTravelWaits) {
  const std::size_t length = 1000;
  for (int n : {1, 2, 3, 4}) {
    auto ranks = in_process(n, {.deadline = 30});
    std::vector<std::vector<double>> came(static_cast<std::size_t>(n)), left = came;
    all_well(ranks_say(n, [&](int r) {
      TopK top(0.05, length);
      require(top.k() == 50, "k is ", top.k());
      std::vector<double>& sum = came[std::size_t(r)];
      sum.resize(length);
      for (int step = 0; step < 7; step++) {
        std::vector<float> g = gradients(step, r, length);
        std::vector<float> whole = g;
        for (std::size_t i = 0; i < length; i++) whole[i] += top.residual()[i];
        top.begin(*ranks[std::size_t(r)], g.data()).wait();
        top.end(g.data());
        top.finish_step(true);
        for (std::size_t i = 0; i < length; i++) sum[i] += g[i];
        // What left was no smaller than what stayed.
        float smallest = 1e9f, largest = 0;
        for (std::size_t i = 0; i < length; i++)
          if (whole[i] != 0 && top.residual()[i] == 0)
            smallest = std::min(smallest, std::abs(whole[i]));
          else
            largest = std::max(largest, std::abs(top.residual()[i]));
        require(smallest >= largest, smallest, " travelled and ", largest, " stayed");
      }
      left[std::size_t(r)].assign(top.residual().begin(), top.residual().end());
    }));
    if (HasFailure()) return;
    for (int r = 1; r < n; r++) EXPECT_TRUE(came[std::size_t(r)] == came[0]) << "rank " << r;
    for (std::size_t i = 0; i < length; i++) {
      double given = 0, there = came[0][i];
      for (int r = 0; r < n; r++) {
        there += left[std::size_t(r)][i];
        for (int step = 0; step < 7; step++) given += gradients(step, r, length)[i];
      }
      EXPECT_EQ(there, given) << "element " << i;
    }
  }
}

TEST(TopK, AllOfThemAreTheSum) {
  auto ranks = in_process(3, {.deadline = 30});
  all_well(ranks_say(3, [&](int r) {
    TopK top(1, 77);
    std::vector<float> g = gradients(0, r, 77);
    top.begin(*ranks[std::size_t(r)], g.data()).wait();
    top.end(g.data());
    top.finish_step(true);
    for (std::size_t i = 0; i < 77; i++) {
      const float sum = gradients(0, 0, 77)[i] + gradients(0, 1, 77)[i] + gradients(0, 2, 77)[i];
      require(g[i] == sum && top.residual()[i] == 0, "element ", i, " is ", g[i], ", the sum is ", sum);
    }
  }));
}

// It is seen on all ranks, though more elements are broken than travel, and the residual is what it was.
TEST(TopK, AStepThatIsNotMadeLeavesTheResidual) {
  auto ranks = in_process(2, {.deadline = 30});
  all_well(ranks_say(2, [&](int r) {
    TopK top(0.1, 100);
    auto step = [&](std::vector<float> g, bool made) {
      top.begin(*ranks[std::size_t(r)], g.data()).wait();
      top.end(g.data());
      top.finish_step(made);
      return g;
    };
    step(gradients(0, r, 100), true);
    const std::vector<float> before = top.residual();
    std::vector<float> broken = gradients(1, r, 100);
    if (r == 1) std::fill(broken.begin(), broken.begin() + 40, std::nanf(""));
    const auto sum = step(broken, false);
    require(std::any_of(sum.begin(), sum.end(), [](float v) { return std::isnan(v); }), "rank ", r, " does not see it");
    require(top.residual() == before, "the residual changed");
    for (float v : step(gradients(2, r, 100), true)) require(std::isfinite(v), "NaN came back");
  }));
}

TEST(TopK, AShareThatIsNoneIsRefused) {
  for (double share : {0.0, -0.1, 1.5, std::nan("")}) EXPECT_THROW(TopK(share, 10), Error) << share;
}

// ---- in training ----------------------------------------------------------------------------------------------------
struct Ended {
  std::vector<double> weights, losses;
  std::uint64_t bytes = 0;
};

struct Plain : Module {
  Linear& fc1 = child<Linear>("fc1", 64, 64, true, true);
  Linear& fc2 = child<Linear>("fc2", 64, 10);
  Variable forward(const Variable& x) override { return fc2(fc1(flatten(x))); }
};

// The second step is not finite on rank 1.
std::vector<Ended> train(int n, const AllReduceOptions& options, int steps) {
  auto ranks = in_process(n, {.deadline = 30});
  std::vector<Ended> runs(static_cast<std::size_t>(n));
  all_well(ranks_say(n, [&](int r) {
    Ended& run = runs[std::size_t(r)];
    auto strategy = all_reduce(std::move(ranks[std::size_t(r)]), options);
    auto backend = reference_backend(1);
    Plain model;
    FlatParameters flat(model, *backend, 1);
    SGD sgd({.learning_rate = 0.05, .momentum = 0.9});
    sgd.bind(flat);
    strategy->begin(flat, sgd);
    sgd.if_not_finite = IfNotFinite::skip;
    const Tensor x = Tensor::of(*backend, {8, 8, 8, 1}, numbers("x" + std::to_string(r), 512));
    const Tensor y = Tensor::of(*backend, {8}, {0, 1, 2, 3, 4, 5, 6, 7}, DType::i32);
    for (int i = 0; i < steps; i++) {
      flat.zero_gradients();
      Variable loss = cross_entropy(model(Variable(x)), y);
      if (i == 1 && r == 1) loss = loss * std::nan("");
      flat.backward(loss, 1.0 / n);
      const auto before = flat.values.values();
      const bool made = strategy->step(sgd, loss) == StepResult::made;
      require(made == (i != 1) && made == (flat.values.values() != before), "a step that is not finite was made");
      run.losses.push_back(loss.item());
    }
    strategy->end();
    run.weights = flat.values.values();
    for (const auto& [name, value] : strategy->end())
      if (name == "sent_bytes") run.bytes = std::uint64_t(value);
  }));
  for (const Ended& run : runs) EXPECT_TRUE(run.weights == runs[0].weights);
  return runs;
}

TEST(TopK, RanksTrainAlike) {
  for (int n : {2, 3}) {
    const auto dense = train(n, {}, 40), all = train(n, {.top_k = 1}, 40), few = train(n, {.top_k = 0.02}, 40);
    EXPECT_LE(difference(all[0].weights, dense[0].weights).error, 1e-5);
    EXPECT_GT(difference(few[0].weights, dense[0].weights).error, 1e-4);
    EXPECT_LT(few[0].losses.back(), few[0].losses.front() / 2) << "it does not learn";
    EXPECT_LT(double(few[0].bytes), 0.25 * double(dense[0].bytes)) << n << " ranks";
  }
}

TEST(TopK, DoublesAreRefused) {
  auto alone_here = in_process(1);
  auto strategy = all_reduce(std::move(alone_here[0]), {.top_k = 0.1});
  auto backend = reference_backend(1);
  Plain model;
  FlatParameters flat(model, *backend, 1, {}, DType::f64);
  SGD sgd({});
  EXPECT_THROW(strategy->begin(flat, sgd), UsageError);
}

}  // namespace
}  // namespace tandem::test
