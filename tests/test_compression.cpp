// Compressed gradients: only the largest travel, or products of thin matrices. What does not travel waits, so nothing
// is lost, and all ranks agree to the bit.
#include "dist/strategies/all_reduce.h"
#include "dist/strategies/power_sgd.h"
#include "dist/strategies/top_k.h"
#include "tests/replicas.h"

namespace tandem::test {
namespace {

// The sum that a rank has after an exchange of g.
std::vector<float> exchanged(Compression& compression, Communicator& over, std::vector<float> g, bool made = true) {
  compression.begin(over, g.data()).wait();
  compression.end(g.data());
  compression.finish_step(made);
  return g;
}

// ---- top-k ----------------------------------------------------------------------------------------------------------
// Whole numbers, so that sums are exact in any order.
std::vector<float> gradients(int step, int rank, std::size_t n) {
  const auto g = numbers("g" + std::to_string(step) + "," + std::to_string(rank), std::int64_t(n), -1000, 1000, 1);
  return {g.begin(), g.end()};
}

void what_does_not_travel_waits(int n, double share) {
  const std::size_t length = 1000;
  auto ranks = in_process(n, {.deadline = 30});
  std::vector<std::vector<double>> came(static_cast<std::size_t>(n)), left = came;
  all_well(ranks_say(n, [&](int r) {
    TopK top(share, length);
    require(top.k() == std::int64_t(share * length), "k is ", top.k());
    std::vector<double>& sum = came[r];
    sum.resize(length);
    for (int step = 0; step < 7; step++) {
      std::vector<float> whole = gradients(step, r, length);
      for (std::size_t i = 0; i < length; i++) whole[i] += top.residual()[i];
      const auto g = exchanged(top, *ranks[r], gradients(step, r, length));
      for (std::size_t i = 0; i < length; i++) sum[i] += g[i];
      // What left was no smaller than what stayed.
      float smallest = 1e9f, largest = 0;
      for (std::size_t i = 0; i < length; i++)
        if (whole[i] != 0 && top.residual()[i] == 0)
          smallest = std::min(smallest, std::abs(whole[i]));
        else
          largest = std::max(largest, std::abs(top.residual()[i]));
      require(smallest >= largest, smallest, " travelled and ", largest, " stayed");
      require(share < 1 || largest == 0, largest, " stayed where all travel");
    }
    left[r].assign(top.residual().begin(), top.residual().end());
  }));
  if (testing::Test::HasFailure()) return;
  for (int r = 1; r < n; r++) EXPECT_TRUE(came[r] == came[0]) << "rank " << r;
  for (std::size_t i = 0; i < length; i++) {
    double given = 0, there = came[0][i];
    for (int r = 0; r < n; r++) {
      there += left[r][i];
      for (int step = 0; step < 7; step++) given += gradients(step, r, length)[i];
    }
    EXPECT_EQ(there, given) << "element " << i;
  }
}
TEST(TopK, WhatDoesNotTravelWaits) {
  for (int n : {1, 2, 3, 4})
    for (double share : {0.05, 1.0}) what_does_not_travel_waits(n, share);
}

// It is seen on all ranks, though more elements are broken than travel, and the residual is what it was.
TEST(TopK, AStepThatIsNotMadeLeavesTheResidual) {
  auto ranks = in_process(2, {.deadline = 30});
  all_well(ranks_say(2, [&](int r) {
    TopK top(0.1, 100);
    auto step = [&](const std::vector<float>& g, bool made) { return exchanged(top, *ranks[r], g, made); };
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

// ---- PowerSGD -------------------------------------------------------------------------------------------------------
constexpr std::int64_t length = 200;
// Two matrices with elements before, between and behind them: 100 × 1 would be no shorter.
const std::vector<PowerSgd::Matrix> matrices{{3, 6, 12}, {80, 14, 7}};

std::vector<float> gradient(int rank, int step) {
  return numbers_as<float>("g" + std::to_string(rank) + "/" + std::to_string(step), length);
}

// What each rank has after `steps` exchanges: the sum of all results, and what waits.
struct Summed {
  std::vector<double> results = std::vector<double>(length), given = results;
  std::vector<std::vector<float>> last;
};
std::vector<Summed> all_exchanged(int n, std::int64_t rank, int steps, const std::vector<bool>& made = {}) {
  auto ranks = in_process(n, {.deadline = 30});
  std::vector<Summed> all(static_cast<std::size_t>(n));
  all_well(ranks_say(n, [&](int r) {
    PowerSgd power(rank, matrices, length);
    Summed& mine = all[r];
    for (int step = 0; step < steps; step++) {
      const bool counts = made.empty() || made[step];
      const auto given = gradient(r, step), g = exchanged(power, *ranks[r], given, counts);
      for (std::size_t i = 0; counts && i < g.size(); i++) mine.results[i] += g[i], mine.given[i] += given[i];
      mine.last = {g, power.residual()};
    }
  }));
  for (const Summed& s : all) EXPECT_TRUE(s.last[0] == all[0].last[0]) << "ranks have different sums";
  return all;
}

TEST(PowerSgd, AtFullRankItIsTheSum) {
  for (int n : {1, 2, 3}) {
    const auto all = all_exchanged(n, 100, 1);
    for (std::size_t i = 0; i < std::size_t(length); i++) {
      double want = 0;
      for (const Summed& s : all) want += s.given[i];
      ASSERT_NEAR(all[0].results[i], want, 2e-6) << n << " ranks, element " << i;
    }
  }
}

TEST(PowerSgd, WhatDoesNotTravelWaits) {
  for (int n : {1, 2, 3}) {
    const auto all =
        all_exchanged(n, 2, 20, std::vector<bool>{1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0});
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
    const auto sum = exchanged(power, *ranks[0], g);
    for (std::size_t i = 0; i < 40; i++) ASSERT_NEAR(sum[i], g[i], 1e-5) << i;
  }
}

TEST(PowerSgd, NaNArrives) {
  PowerSgd power(2, matrices, length);
  auto ranks = in_process(1);
  std::vector<float> g = gradient(0, 0);
  g[10] = std::nanf("");
  const auto sum = exchanged(power, *ranks[0], g, false);
  EXPECT_TRUE(std::any_of(sum.begin(), sum.end(), [](float v) { return std::isnan(v); }));
  for (float v : power.residual()) EXPECT_EQ(v, 0);
}

// ---- in training ----------------------------------------------------------------------------------------------------
struct TwoLayers : Plain {
  TwoLayers() : Plain({.hidden = 64}) {}
};
struct Layers : Module {
  Linear& fc1 = child<Linear>("fc1", 64, 64, true, true);
  Linear& fc2 = child<Linear>("fc2", 64, 48, true, true);
  Linear& fc3 = child<Linear>("fc3", 48, 10);
  Variable forward(const Variable& x) override { return fc3(fc2(fc1(flatten(x)))); }
};
struct Trained {
  std::vector<double> weights, losses;
  double bytes = 0;
};
// 40 steps in f32. The second is not finite on rank 1, and is not made.
template <class Model>
Trained trained(int n, const AllReduceOptions& options) {
  auto ranks = in_process(n, {.deadline = 30});
  std::vector<Trained> runs(static_cast<std::size_t>(n));
  all_well(ranks_say(n, [&](int r) {
    Trained& run = runs[r];
    auto strategy = all_reduce(std::move(ranks[r]), options);
    auto backend = reference_backend(1);
    Model model;
    FlatParameters flat(model, *backend, 1);
    BoundSgd sgd(flat, {.learning_rate = 0.05, .momentum = 0.9});
    strategy->begin(flat, sgd);
    sgd.if_not_finite = IfNotFinite::skip;
    const Tensor x = Tensor::of(*backend, {8, 8, 8, 1}, numbers("x" + std::to_string(r), 512));
    const Tensor y = Tensor::of(*backend, {8}, {0, 1, 2, 3, 4, 5, 6, 7}, DType::i32);
    for (int i = 0; i < 40; i++) {
      flat.zero_gradients();
      Variable loss = cross_entropy(model(Variable(x)), y);
      if (i == 1 && r == 1) loss = loss * std::nan("");
      flat.backward(loss, 1.0 / n);
      const auto before = flat.values.values();
      const bool made = strategy->step(sgd, loss) == StepResult::made;
      require(made == (i != 1) && made == (flat.values.values() != before), "a step that is not finite was made");
      run.losses.push_back(loss.item());
    }
    for (const auto& [name, value] : strategy->end())
      if (name == "sent_bytes") run.bytes = value;
    run.weights = flat.values.values();
  }));
  for (const Trained& run : runs) EXPECT_TRUE(run.weights == runs[0].weights);
  return runs[0];
}

// whole: everything is sent; part: little of it is.
template <class Model>
void expect_trains_alike(const AllReduceOptions& dense_options, const AllReduceOptions& whole_options,
                         const AllReduceOptions& part_options, double tolerance, double bytes) {
  for (int n : {2, 3}) {
    const Trained dense = trained<Model>(n, dense_options), whole = trained<Model>(n, whole_options),
                  part = trained<Model>(n, part_options);
    EXPECT_LE(difference(whole.weights, dense.weights).error, tolerance);
    EXPECT_GT(difference(part.weights, dense.weights).error, 1e-4);
    EXPECT_LT(part.losses.back(), part.losses.front() / 2) << "it does not learn";
    EXPECT_LT(part.bytes, bytes * dense.bytes) << n << " ranks";
  }
}
TEST(Compression, RanksTrainAlike) {
  expect_trains_alike<TwoLayers>({}, {.top_k = 1}, {.top_k = 0.02}, 1e-5, 0.25);
  expect_trains_alike<Layers>({.bucket_bytes = 4096}, {.bucket_bytes = 4096, .power_sgd = 64},
                              {.bucket_bytes = 4096, .power_sgd = 2}, 1e-6, 0.4);
}

TEST(Compression, WhatDoesNotFitIsRefused) {
  for (double share : {0.0, -0.1, 1.5, std::nan("")}) EXPECT_THROW(TopK(share, 10), Error) << share;
  for (std::int64_t rank : {0, -1}) EXPECT_THROW(PowerSgd(rank, {}, 10), Error) << rank;
  for (auto [options, name] :
       {std::pair{AllReduceOptions{.top_k = 0.1}, "wire=topk"}, {{.power_sgd = 2}, "wire=powersgd"}}) {
    auto strategy = all_reduce(alone(), options);
    auto backend = reference_backend(1);
    Layers model;
    FlatParameters flat(model, *backend, 1, {}, DType::f64);
    BoundSgd sgd(flat, {});
    EXPECT_REFUSED(strategy->begin(flat, sgd), name, "f32");
  }
}

}  // namespace
}  // namespace tandem::test
