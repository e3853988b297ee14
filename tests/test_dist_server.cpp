// The parameter server on ranks that are threads: what it computes is what one machine computes, whatever the number of
// servers; who waits for whom; what is refused.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>

#include "core/random.h"
#include "dist/rules.h"
#include "dist/server.h"
#include "tests/ranks.h"
#include "tests/support.h"

namespace tandem::test {
namespace {

constexpr std::int64_t n = 5 * 1024 + 128;  // shards of different lengths

std::vector<double> drawn(std::uint32_t what) {
  std::vector<double> v(n);
  const Philox random(11, Stream::test, 0, what);
  for (std::int64_t i = 0; i < n; i++) v[std::size_t(i)] = double(uniform(random.word(std::uint32_t(i)))) - 0.5;
  return v;
}

struct Ended {
  std::vector<double> weights;
  Member::Counts counts;
};
// body(rank, member, gradient, weights) for each of `ranks` threads, then finish().
template <class Body>
std::vector<Ended> serve(int ranks, ServerOptions options, DType dtype, const Body& body) {
  auto channels = in_process_channels(ranks, 30);
  std::vector<Ended> ends(static_cast<std::size_t>(ranks));
  options.deadline = 30;
  if (!options.learning_rate) options.learning_rate = [](std::int64_t) { return double(0.1f); };
  options.chunk = 700;  // several to a shard, and a rest
  all_well(ranks_say(ranks, [&](int r) {
    auto backend = reference_backend();
    Tensor weights = Tensor::of(*backend, {n}, drawn(0), dtype), gradient = Tensor::zeros(*backend, {n}, dtype);
    Member member(std::move(channels[std::size_t(r)]), weights, std::vector<float>(n / 64, 1.f), options);
    body(r, member, gradient, weights);
    member.finish(weights);
    ends[std::size_t(r)] = {weights.values(), member.counts()};
  }));
  for (std::size_t r = 1; r < ends.size(); r++) EXPECT_EQ(ends[r].weights, ends[0].weights) << "rank " << r;
  return ends;
}

// Gradients of a bowl, w − centre, that differ from worker to worker and step to step.
void bowl(Tensor& g, const Tensor& w, int rank, int step) {
  const std::vector<double> at = w.values(), centre = drawn(std::uint32_t(100 + rank + 16 * step));
  std::vector<double> v(n);
  for (std::size_t i = 0; i < v.size(); i++) v[i] = at[i] - centre[i];
  g.copy_from(Tensor::of(g.backend(), {n}, v, g.dtype()));
}
auto steps_of(int steps) {
  return [steps](int rank, Member& member, Tensor& gradient, Tensor& weights) {
    for (int s = 0; s < steps; s++) {
      bowl(gradient, weights, rank, s);
      member.push(gradient, 16);
      member.pull(weights);
    }
  };
}

TEST(Server, CutsAreEven) {
  EXPECT_EQ(shard_cuts(n, 1), (std::vector<std::int64_t>{0, n}));
  EXPECT_EQ(shard_cuts(n, 4), (std::vector<std::int64_t>{0, 1024, 3072, 4096, n}));
  EXPECT_EQ(shard_cuts(64, 3), (std::vector<std::int64_t>{0, 0, 0, 64}));
}

TEST(Server, BspIsTheMeanOfAllInOneStep) {
  for (int ranks : {2, 3, 4}) {
    std::vector<double> w = drawn(0), v(n, 0.0);
    for (int step = 0; step < 20; step++) {
      std::vector<double> g(n, 0.0);
      for (int r = 0; r < ranks; r++) {
        const std::vector<double> centre = drawn(std::uint32_t(100 + r + 16 * step));
        for (std::size_t i = 0; i < g.size(); i++) g[i] += (w[i] - centre[i]) / ranks;
      }
      for (std::size_t i = 0; i < g.size(); i++) v[i] = double(0.9f) * v[i] + g[i], w[i] -= double(0.1f) * v[i];
    }
    std::vector<double> first;
    for (int servers = 1; servers <= ranks; servers++) {
      const auto ends = serve(ranks, {.how = Asynchrony::parse("bsp"), .servers = servers}, DType::f64, steps_of(20));
      double most = 0;
      for (std::size_t i = 0; i < w.size(); i++) most = std::max(most, std::abs(ends[0].weights[i] - w[i]));
      EXPECT_LT(most, 1e-12) << ranks << " ranks, " << servers << " servers";
      if (servers == 1) first = ends[0].weights;
      EXPECT_EQ(ends[0].weights, first) << servers << " servers";
      EXPECT_EQ(ends[0].counts.version, 20u);
      EXPECT_EQ(ends[0].counts.samples, 20 * 16 * ranks);
    }
  }
}

TEST(Server, OneWorkerIsOneMachine) {
  const auto ends = serve(1, {}, DType::f32, steps_of(10));
  EXPECT_EQ(ends[0].counts.delays, std::vector<std::int64_t>{10});
  EXPECT_EQ(ends[0].weights, serve(1, {.how = Asynchrony::parse("asp+asgd-m")}, DType::f32, steps_of(10))[0].weights);
}

TEST(Server, EveryRuleAppliesWhatItAcknowledges) {
  for (const std::string& rule : rule_names()) {
    const auto ends = serve(4, {.how = Asynchrony::parse(rule), .servers = 3}, DType::f32, steps_of(15));
    for (int s = 0; s < 3; s++) {
      EXPECT_EQ(ends[std::size_t(s)].counts.applied, std::vector<std::int64_t>(4, 15)) << rule;
      EXPECT_EQ(ends[std::size_t(s)].counts.version, 60u);
      std::int64_t pushes = 0;
      for (std::int64_t d : ends[std::size_t(s)].counts.delays) pushes += d;
      EXPECT_EQ(pushes, 60);
    }
    EXPECT_EQ(ends[3].counts.version, 0u);  // no server
  }
}

// All elements of a gradient are the same, and so are those of a whole version of a shard.
TEST(Server, APulledShardIsOfOneVersion) {
  const auto cuts = shard_cuts(n, 4);
  serve(4, {.how = Asynchrony::parse("asgd")}, DType::f32,
        [&](int rank, Member& member, Tensor& gradient, Tensor& weights) {
          for (int s = 0; s < 40; s++) {
            const std::vector<double> before = drawn(0);
            gradient.fill(0.001 * (rank + 1));
            member.push(gradient, 1);
            member.pull(weights);
            const std::vector<double> now = weights.values();
            for (int shard = 0; shard < 4; shard++) {
              const auto begin = std::size_t(cuts[std::size_t(shard)]);
              for (auto i = begin; i < std::size_t(cuts[std::size_t(shard) + 1]); i++)
                ASSERT_NEAR(now[i] - before[i], now[begin] - before[begin], 1e-5)
                    << "shard " << shard << ", element " << i;
            }
          }
        });
}

TEST(Server, SspHoldsBackWhoIsAhead) {
  for (int bound : {0, 2}) {
    std::vector<std::atomic<int>> at(3);
    int most = 0;
    std::mutex mutex;
    serve(3, {.how = Asynchrony::parse("ssp:" + std::to_string(bound)), .servers = 2}, DType::f32,
          [&](int rank, Member& member, Tensor& gradient, Tensor& weights) {
            for (int s = 0; s < 12; s++) {
              if (rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(4));
              {
                std::lock_guard lock(mutex);
                for (auto& other : at) most = std::max(most, s - other);
              }
              member.push(gradient, 1);
              member.pull(weights);
              at[std::size_t(rank)] = s + 1;
            }
          });
    // `at` follows the push: a worker whose push is applied and not yet acknowledged is one further than it says.
    EXPECT_LE(most, bound + 1);
    EXPECT_GE(most, std::min(bound, 2));
  }
}

TEST(Server, WhatIsNotFiniteIsRefusedAndCounted) {
  const auto ends = serve(2, {.how = Asynchrony::parse("asgd")}, DType::f32,
                          [&](int rank, Member& member, Tensor& gradient, Tensor& weights) {
                            for (int s = 0; s < 5; s++) {
                              bowl(gradient, weights, rank, s);
                              if (rank == 1 && s == 2) gradient.write<float>()[n - 1] = std::nanf("");
                              member.push(gradient, 16);
                              member.pull(weights);
                            }
                          });
  EXPECT_EQ(ends[1].counts.refused, (std::vector<std::int64_t>{0, 1}));
  EXPECT_EQ(ends[1].counts.applied, (std::vector<std::int64_t>{5, 4}));
  for (double w : ends[0].weights) ASSERT_TRUE(std::isfinite(w));
}

TEST(Server, TheLearningRateFollowsTheSamplesApplied) {
  ServerOptions o{.how = Asynchrony::parse("asgd")};
  std::mutex mutex;
  std::vector<std::int64_t> asked;
  o.learning_rate = [&](std::int64_t samples) {
    std::lock_guard lock(mutex);
    asked.push_back(samples);
    return 0.1;
  };
  o.servers = 1;
  serve(1, o, DType::f32, steps_of(4));
  EXPECT_EQ(asked, (std::vector<std::int64_t>{0, 16, 32, 48}));
}

}  // namespace
}  // namespace tandem::test
