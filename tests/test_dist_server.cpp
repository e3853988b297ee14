// The parameter server on ranks that are threads: what it computes is what one machine computes, whatever the number of
// servers; who waits for whom; what is refused.
#include <limits>
#include <numeric>

#include "dist/collectives/in_process.h"
#include "dist/server/rules.h"
#include "dist/server/shard.h"
#include "dist/server/shard_server.h"
#include "dist/server/worker.h"
#include "tests/support_channels.h"

namespace tandem::test {
namespace {

constexpr std::int64_t n = 5 * 1024 + 128;  // shards of different lengths

Numbers drawn(std::uint32_t what) { return numbers(std::to_string(what), n, -0.5, 0.5); }

template <class T>
std::int64_t total(const std::vector<T>& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

struct Ended {
  std::vector<double> weights, buffers;
  ServerNode::Counts counts;
  std::vector<ShardEvent> events;
  std::string said;
};

struct Serving {
  std::string how = {};  // empty: that of the options
  ServerOptions options = {};
  std::int64_t most = 1;  // batches of a lease
  DType dtype = DType::f32;
  std::int64_t leases = 40;
  ChannelFaults faults = {};
};

// body(rank, r) in a thread for each rank; what each threw, or "".
using Body = std::function<void(Rank&, int r)>;
std::vector<std::string> on_server(int ranks, const Body& body, const ChannelFaults& faults = {}) {
  auto channels = in_process_channels(ranks, faults);
  return ranks_say(ranks, [&](int r) {
    Rank rank(std::move(channels[r]), n);
    body(rank, r);
    rank.node.gather("");
  });
}

// A lease, by its number, in the hand of a rank that fills in its gradient.
struct Turn {
  int rank;
  ServerNode& node;
  std::int64_t number;
  Tensor &gradient, &weights;
  void fills(const Numbers& g) const { gradient.copy_from(Tensor::of(gradient.backend(), {n}, g, gradient.dtype())); }
};

// step() fills in the gradient of every lease, in a thread for each of `ranks`.
std::vector<Ended> serve(int ranks, Serving how, const std::function<void(const Turn&)>& step) {
  if (!how.how.empty()) how.options.how = Asynchrony::parse(how.how);
  if (!how.options.learning_rate) how.options.learning_rate = [](std::int64_t) { return double(0.1f); };
  std::vector<Ended> ends(static_cast<std::size_t>(ranks));
  const Body body = [&](Rank& rank, int r) {
    rank.weights = Tensor::of(*rank.backend, {n}, drawn(r == 0 ? 0 : 77), how.dtype);
    rank.buffers = Tensor::of(*rank.backend, {40}, std::vector<double>(40, 1.0), how.dtype);
    rank.share_gradient(how.dtype);
    rank.begin(how.options, {0, how.leases, how.most});
    rank.train([&](std::int64_t lease) { step({r, rank.node, lease, rank.gradient, rank.weights}); }, {1, 2, 16});
    rank.node.gather("");
    ends[r] = {rank.weights.values(), rank.buffers.values(), rank.node.counts(), rank.node.events(), ""};
  };
  const auto said = on_server(ranks, body, how.faults);
  for (std::size_t r = 0; r < ends.size(); r++) ends[r].said = said[r];
  return ends;
}
// Nobody failed, and all who train have the same weights.
using test::all_well;
void all_well(const std::vector<Ended>& ends) {
  for (std::size_t r = 0; r < ends.size(); r++) ASSERT_EQ(ends[r].said, "") << "rank " << r;
  for (std::size_t r = 0; r < ends.size(); r++)
    EXPECT_TRUE(ends[r].counts.exchanges == 0 || ends[r].weights == ends[0].weights) << "rank " << r;
}

// Gradients of a bowl, w − centre, another centre for every lease.
void bowl(const Turn& t) {
  Numbers v = t.weights.values();
  const Numbers centre = drawn(std::uint32_t(100 + t.number));
  for (std::size_t i = 0; i < v.size(); i++) v[i] -= centre[i];
  t.fills(v);
}

TEST(Server, CutsAreEven) {
  EXPECT_EQ(shard_cuts(n, 1), (std::vector<std::int64_t>{0, n}));
  EXPECT_EQ(shard_cuts(n, 4), (std::vector<std::int64_t>{0, 1024, 3072, 4096, n}));
  EXPECT_EQ(shard_cuts(64, 3), (std::vector<std::int64_t>{0, 0, 0, 64}));
}

// What the step makes of the weights: ParameterServer.BspIsAllReduceInDouble.
TEST(Server, BspIsOneStepOfAll) {
  for (int ranks : {2, 3, 4})
    for (bool shared : {true, false}) {
      const auto ends = serve(ranks, {.how = "bsp", .leases = 20 * ranks, .faults = {.shared_memory = shared}}, bowl);
      all_well(ends);
      EXPECT_EQ(ends[0].counts.shard.version, 20u);
      EXPECT_EQ(ends[0].counts.shard.samples, 20 * 16 * ranks);
    }
}

// Where all push, a quorum of all under its rule is the outer optimizer: m = β·m + Δ; θ = θ − γ(Δ + β·m), Δ the mean.
TEST(Server, AQuorumOfAllIsTheSynchronousOuterStep) {
  constexpr int steps = 20;
  const double beta = double(0.9f), gamma = double(0.7f);
  for (int ranks : {1, 2, 3}) {
    const auto delta = [](int r, int step, Numbers w) {
      const Numbers centre = drawn(std::uint32_t(100 + r));
      for (std::size_t i = 0; i < w.size(); i++) w[i] += 0.01 * (r + step) - centre[i];
      return w;
    };
    Numbers w = drawn(0), m(n, 0.0);
    for (int step = 0; step < steps; step++) {
      Numbers mean(n, 0.0);
      for (int r = 0; r < ranks; r++)
        for (std::size_t i = 0; const double d : delta(r, step, w)) mean[i++] += d / ranks;
      for (std::size_t i = 0; i < mean.size(); i++)
        m[i] = beta * m[i] + mean[i], w[i] -= gamma * (mean[i] + beta * m[i]);
    }
    const std::string how = "quorum:" + std::to_string(ranks) + ",grace=30+delayed-nesterov:every=1";
    std::vector<int> made(3);
    std::vector<std::vector<double>> then(3);  // after so many steps; the last of all may have fewer pushes
    all_well(serve(ranks,
                   {.how = how,
                    .options = {.learning_rate = [&](std::int64_t) { return gamma; }},
                    .dtype = DType::f64,
                    .leases = (steps + 4) * ranks},
                   [&](const Turn& t) {
                     const int step = made[t.rank]++;
                     const Numbers at = t.weights.values();
                     if (step == steps) then[t.rank] = at;
                     t.fills(delta(t.rank, step, at));
                   }));
    for (int r = 0; r < ranks; r++) EXPECT_LT(largest_gap(then[r], w), 1e-12) << ranks << " ranks, rank " << r;
  }
}

// Rank 0 evaluates, say: its training thread does nothing for the server. Or a worker stops under a quorum: what it
// pushes then is late, and applied.
TEST(Server, WhoIsBusyElsewhereStopsNobody) {
  for (auto [how, busy, pushes, leases] : {std::tuple{"asgd", 0, 20, 60}, {"quorum:2,grace=0.01+asgd", 2, 60, 150}})
    for (bool shared : {true, false}) {
      std::atomic<int> others = 0;
      int meanwhile = 0;
      const Serving serving{.how = how, .leases = leases, .faults = {.shared_memory = shared}};
      const auto ends = serve(3, serving, [&, busy = busy, pushes = pushes](const Turn& t) {
        t.gradient.fill(0);
        if (t.rank != busy) return void(others++);  // the push before was answered
        if (meanwhile > 0) return;
        const int before = others;
        wait_until([&] { return others >= before + pushes; });
        meanwhile = others - before;
      });
      all_well(ends);
      EXPECT_GE(meanwhile, pushes) << how;
      EXPECT_EQ(total(ends[0].counts.shard.delays), leases) << how;
      EXPECT_TRUE(busy == 0 || ends[0].counts.shard.delays.size() >= 25) << "its τ";
    }
}

// Both wait for each other in every step, and one is four times as slow: it stays at a quarter of the batches.
TEST(Server, WaitingForAQuorumIsNoSlowness) {
  std::vector<std::int64_t> counts;
  all_well(serve(2, {.how = "quorum:2,grace=30+asgd", .most = 16, .leases = 1000}, [&](const Turn& t) {
    t.gradient.fill(0);
    std::this_thread::sleep_for(std::chrono::milliseconds(t.node.lease_count() * (t.rank == 1 ? 4 : 1)));
    if (t.rank == 1) counts.push_back(t.node.lease_count());
  }));
  ASSERT_GT(counts.size(), 20u);
  EXPECT_GE(*std::max_element(counts.end() - 8, counts.end()), 3);
  EXPECT_LE(*std::min_element(counts.end() - 8, counts.end()), 6);
}

TEST(Server, UnderAQuorumStatisticsAreAveragedInAsTheyCome) {
  const auto ends = serve(3, {.how = "quorum:2,grace=5+asgd", .options = {.servers = 1}}, bowl);
  all_well(ends);
  EXPECT_EQ(ends[0].counts.shard.version, 40u) << "rank 0 serves them alone";
  EXPECT_LT(ends[2].counts.shard.version, 30u);
}

// Without a grace time each of four shards leaves out another worker now and then, and each worker waits for the shard
// that left it out.
TEST(Server, ShardsWithOtherQuorumsDoNotWaitForEachOther) {
  for (std::uint64_t seed : {1, 2, 3})
    all_well(serve(4,
                   {.how = "quorum:3,grace=0+asgd",
                    .leases = 200,
                    .faults = {.delays = seed, .duplicates = true, .shared_memory = seed > 1}},
                   bowl));
}

// Parts in any order while the rest is computed, not always all of them: nothing else comes of it.
TEST(Server, APushInPartsIsAPush) {
  const std::vector<Range> parts{{3072, n}, {64, 1088}, {1088, 3072}, {0, 64}};
  for (const auto& [how, wire] : {std::pair("ddc-asgd", DType::f32), {"ddc-asgd", DType::bf16}, {"bsp", DType::f32}}) {
    const bool one = how == std::string("ddc-asgd");  // worker: of several, which one pushes first is chance
    for (bool shared : {true, false}) {
      const Serving serving{.how = how,
                            .options = {.servers = one ? 2 : 0, .wire = wire},
                            .faults = {.delays = 4, .duplicates = true, .shared_memory = shared}};
      const auto whole_ones = serve(3, serving, bowl);
      const auto in_parts = serve(3, serving, [&](const Turn& t) {
        bowl(t);
        for (std::size_t p = 0; p < std::size_t((t.number + t.rank) % 5); p++)
          t.node.push_part(whole(t.gradient), parts[p]);
      });
      all_well(whole_ones), all_well(in_parts);
      EXPECT_EQ(in_parts[0].weights, whole_ones[0].weights) << how;
      EXPECT_EQ(in_parts[0].counts.early_bytes > 0, !shared || wire == DType::bf16);
    }
  }
}

// What was sent of a gradient that is never pushed is in no shard; the next exchange is as any other.
TEST(Server, PartsOfWhatIsNotPushedAreForgotten) {
  const Body body = [&](Rank& rank, int r) {
    rank.gradient.fill(-1);
    rank.begin({.how = Asynchrony::parse("asgd"), .servers = 1}, {0, 3});
    rank.train([&](std::int64_t step) {
      EXPECT_EQ(rank.weights.values(), std::vector<double>(n, double(step)));
      if (step == 1) {
        rank.node.push_part(whole(rank.gradient), {0, 2048});
        rank.node.ask();
        rank.pull();
        EXPECT_EQ(rank.weights.values(), std::vector<double>(n, 1)) << "of the first push";
      }
      rank.node.push_part(whole(rank.gradient), {1024, 3072});
    });
    EXPECT_EQ(rank.weights.values(), std::vector<double>(n, r == 0 ? 3 : 0));
    EXPECT_EQ(rank.node.counts().refused, 0);
  };
  all_well(on_server(2, body, {.shared_memory = false}));
}

// The next lease comes while one is in hand; who has one is waited for, although there is no more for it.
TEST(Server, TheNextTicketComesWhileOneIsInHand) {
  for (const std::string how : {"asgd", "ssp:0+asgd"}) {
    // Leases below 3 whose holders have seen the next one. Who has a later lease waits for them.
    std::atomic<int> first_three{0};
    const auto ends = serve(2, {.how = how, .leases = 7}, [&](const Turn& t) {
      wait_until([&] { return t.number < 3 ? t.node.next_lease().has_value() : first_three >= 3; });
      EXPECT_TRUE(t.number >= 3 || t.node.next_lease().value_or(0) > t.number);
      if (t.number < 3) first_three++;
      t.gradient.fill(1);
    });
    all_well(ends);
    EXPECT_EQ(ends[0].counts.exchanges + ends[1].counts.exchanges, 7 + 4) << how;
  }
}

// With one shard of the parameters that is exact. Several may drop different pushes: then no shard lacks a batch.
TEST(Server, WhatIsDroppedIsTrainedAgain) {
  for (const char* how : {"ringmaster:R=1", "ringmaster:R=2+ddc-asgd", "fedbuff:B=7", "rennala:B=3"})
    for (int servers : {1, 0}) {
      SCOPED_TRACE(std::string(how) + (servers ? ", one server" : ""));
      const auto ends = serve(4 + servers,
                              {.how = how,
                               .options = {.servers = servers, .learning_rate = [](std::int64_t) { return 1e-3; }},
                               .leases = 60},
                              bowl);
      all_well(ends);
      std::int64_t told = 0;
      for (const Ended& e : ends) told += e.counts.dropped;
      const ShardCounts& c = (servers ? ends.back() : ends[0]).counts.shard;  // the first shard, which decides
      const std::int64_t dropped = total(c.dropped), applied = total(c.applied);
      EXPECT_LE(c.delays.size(), std::size_t(Asynchrony::parse(how).bound));
      EXPECT_EQ(told, dropped);
      EXPECT_EQ(applied, 60);
      EXPECT_EQ(c.participation(), double(applied) / double(applied + dropped));
    }
}

// All elements of a gradient are the same, and so are those of a whole version of a shard.
TEST(Server, APulledShardIsOfOneVersion) {
  const auto cuts = shard_cuts(n, 4);
  for (bool shared : {true, false})
    all_well(
        serve(4, {.how = "asgd", .leases = 160, .faults = {.delays = 5, .shared_memory = shared}}, [&](const Turn& t) {
          const std::vector<double> before = drawn(0), now = t.weights.values();
          for (int shard = 0; shard < 4; shard++) {
            const auto begin = std::size_t(cuts[shard]);
            for (auto i = begin; i < std::size_t(cuts[std::size_t(shard) + 1]); i++)
              ASSERT_NEAR(now[i] - before[i], now[begin] - before[begin], 1e-5)
                  << "shard " << shard << ", element " << i;
          }
          t.gradient.fill(0.001 * (t.rank + 1));
        }));
}

TEST(Server, SspHoldsBackWhoIsAhead) {
  for (int bound : {0, 2}) {
    std::vector<int> pushed(3);
    int most = 0;
    std::mutex mutex;
    all_well(serve(3, {.how = "ssp:" + std::to_string(bound), .leases = 36}, [&](const Turn& t) {
      if (t.rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(4));
      t.gradient.fill(0);
      std::lock_guard lock(mutex);
      most = std::max(most, pushed[t.rank] - *std::min_element(pushed.begin(), pushed.end()));
      pushed[t.rank]++;
    }));
    // `pushed` precedes the push.
    EXPECT_LE(most, bound + 1);
    EXPECT_GE(most, std::min(bound, 2));
  }
}

TEST(Server, WhatIsNotFiniteIsRefusedAndCounted) {
  for (bool shared : {true, false}) {
    std::atomic<int> by_rank_1 = 0;
    const auto ends = serve(2, {.how = "asgd", .leases = 30, .faults = {.shared_memory = shared}}, [&](const Turn& t) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      bowl(t);
      if (t.rank == 1 && ++by_rank_1 == 3) t.gradient.write<float>()[n - 1] = std::nanf("");
    });
    all_well(ends);
    ASSERT_GE(by_rank_1, 3);
    EXPECT_EQ(ends[1].counts.shard.refused, (std::vector<std::int64_t>{0, 1}));
    EXPECT_EQ(ends[0].counts.shard.refused, (std::vector<std::int64_t>{0, 0}));  // its half was finite
    EXPECT_EQ(ends[1].counts.shard.version, 29u);
    EXPECT_EQ(ends[1].counts.refused, 1);
    for (double w : ends[0].weights) ASSERT_TRUE(std::isfinite(w));
  }
}

// A shard without a network: who is answered when.
struct Alone {
  std::unique_ptr<Backend> backend = reference_backend(1);
  std::unique_ptr<Rule> rule;
  std::vector<std::int64_t> rates_for = {};  // pushes
  ShardService service;
  explicit Alone(const char* how, int workers = 2)
      : rule(make_rule(Asynchrony::parse(how).rule)),
        service(*rule, Tensor::zeros(*backend, {64}), {RuleBlock{}}, workers,
                {.how = Asynchrony::parse(how), .learning_rate = [this](std::int64_t pushes) {
                   rates_for.push_back(pushes);
                   return 1.0;
                 }}) {}
  std::vector<int> answered(double now = 0) {
    std::vector<int> all;
    for (const ShardService::Answer& a : service.answers(now)) {
      all.push_back(a.worker);
      if (a.verdict == Verdict::refused) told_refused.push_back(a.worker);
      if (a.verdict == Verdict::dropped) told_dropped.push_back(a.worker);
    }
    return all;
  }
  std::vector<int> after_push(int worker, ExchangeId exchange, double now = 0, float value = 1,
                              std::int64_t samples = 16) {
    service.push(worker, exchange, Tensor::full(*backend, {64}, value), samples, Tensor::zeros(*backend, {64}));
    return answered(now);
  }
  double weight() { return service.shard().values().values()[0]; }
  std::vector<int> told_refused = {}, told_dropped = {};
};
using Workers = std::vector<int>;

TEST(ShardService, WithSspNobodyIsFurtherAheadThanTheBound) {
  Alone a("ssp:1+asgd");
  EXPECT_EQ(a.after_push(0, 1), Workers{0});
  EXPECT_EQ(a.after_push(0, 2), Workers{}) << "two steps ahead";
  EXPECT_EQ(a.after_push(1, 1), (Workers{0, 1}));
  EXPECT_EQ(a.after_push(0, 3), Workers{});
  a.service.idle(1, 1);  // it has nothing to push for now
  EXPECT_EQ(a.answered(), Workers{0});
  EXPECT_EQ(a.after_push(1, 2), Workers{1});
  a.service.idle(1, 1);  // late: it has pushed since
  EXPECT_EQ(a.after_push(0, 4), Workers{});
}

TEST(ShardService, RingmasterDropsWhatIsLaterThanItsBound) {
  Alone a("ringmaster:R=2");
  for (ExchangeId k : {1, 2}) EXPECT_EQ(a.after_push(0, k), Workers{0});
  EXPECT_EQ(a.after_push(1, 1, 0, 100), Workers{1}) << "at once, with the present weights";
  EXPECT_EQ(a.told_dropped, Workers{1});
  EXPECT_EQ(a.weight(), -2);
  EXPECT_EQ(a.service.applied(), (std::vector<ExchangeId>{2, 0}));
  EXPECT_EQ(a.after_push(0, 3), Workers{0});
  EXPECT_EQ(a.after_push(1, 2, 0, 4), Workers{1}) << "one late";
  EXPECT_EQ(a.weight(), -7);
  EXPECT_EQ(a.told_dropped, Workers{1});
  EXPECT_EQ(a.service.counts().dropped, (std::vector<std::int64_t>{0, 1}));
  EXPECT_EQ(a.service.counts().delays, (std::vector<std::int64_t>{3, 1}));
  EXPECT_EQ(a.service.counts().participation(), 0.8);
}

TEST(ShardService, FedBuffMakesAStepOfAnyPushesTheLaterTheLess) {
  Alone a("fedbuff:B=2", 3);
  EXPECT_EQ(a.after_push(0, 1, 0, 1), Workers{0}) << "nobody waits";
  EXPECT_EQ(a.weight(), 0);
  EXPECT_EQ(a.service.applied(), (std::vector<ExchangeId>{0, 0, 0}));
  a.service.pull(1, 1, Tensor::zeros(*a.backend, {64}));
  EXPECT_EQ(a.answered(), Workers{}) << "between two steps";
  EXPECT_EQ(a.after_push(0, 2, 0, NAN), Workers{0});
  EXPECT_EQ(a.told_refused, Workers{0});
  EXPECT_EQ(a.after_push(0, 3, 0, 3), (Workers{0, 1}));
  EXPECT_EQ(a.weight(), -2);
  EXPECT_EQ(a.service.applied(), (std::vector<ExchangeId>{3, 0, 0}));
  EXPECT_EQ(a.rates_for, std::vector<std::int64_t>{0});
  a.after_push(2, 1, 0, 4);  // one late
  EXPECT_EQ(a.after_push(1, 2, 0, 1), Workers{1});
  const double after = -2 - (4 / std::sqrt(2) + 1) / 2;
  EXPECT_NEAR(a.weight(), after, 1e-6);
  EXPECT_EQ(a.service.counts().delays, (std::vector<std::int64_t>{3, 1}));
  a.after_push(1, 3, 0, 5);
  a.service.idle(0, 3), a.service.idle(2, 1);
  EXPECT_EQ(a.answered(), Workers{});
  EXPECT_NEAR(a.weight(), after, 1e-6) << "another may come";
  a.service.idle(1, 3);
  a.answered();
  EXPECT_NEAR(a.weight(), after - 5, 1e-6) << "the last step is of what there is";
  EXPECT_EQ(a.service.counts().pushes, 5);
  EXPECT_EQ(a.service.counts().version, 3u);
}

TEST(ShardService, RennalaTakesGradientsOfThePresentWeightsAlone) {
  Alone a("rennala:B=2");
  a.after_push(0, 1, 0, 1);
  EXPECT_EQ(a.after_push(0, 2, 0, 3), Workers{0}) << "both at the same weights";
  EXPECT_EQ(a.weight(), -2);
  EXPECT_EQ(a.after_push(1, 1, 0, 100), Workers{1});
  EXPECT_EQ(a.told_dropped, Workers{1});
  a.after_push(1, 2, 0, 2), a.after_push(0, 3, 0, 4);
  EXPECT_EQ(a.weight(), -5);
  EXPECT_EQ(a.service.counts().delays, std::vector<std::int64_t>{4});
}

// ---- a quorum; times are the test's ---------------------------------------------------------------------------------
constexpr double never = std::numeric_limits<double>::infinity();

TEST(ShardService, AQuorumWaitsForTheOthersNoLongerThanTheGraceTime) {
  Alone a("quorum:2,grace=5+asgd", 4);
  EXPECT_EQ(a.after_push(0, 1, 3, 1), Workers{});
  EXPECT_EQ(a.service.due(), never) << "one is no quorum";
  EXPECT_EQ(a.answered(1e6), Workers{});
  EXPECT_EQ(a.after_push(1, 1, 10, 2), Workers{});
  EXPECT_EQ(a.after_push(2, 1, 12, 6, 32), Workers{});
  EXPECT_EQ(a.service.due(), 15) << "the third does not prolong it";
  EXPECT_EQ(a.answered(14.9), Workers{});
  EXPECT_EQ(a.answered(15), (Workers{0, 1, 2}));
  EXPECT_EQ(a.weight(), -(1 * 16 + 2 * 16 + 6 * 32) / 64.0) << "one step, with the mean over samples";
  EXPECT_EQ(a.service.due(), never);
  EXPECT_EQ(a.after_push(3, 1, 16), Workers{}) << "it is late, and one is no quorum";
  EXPECT_EQ(a.after_push(0, 2, 17), Workers{});
  EXPECT_EQ(a.answered(22), (Workers{0, 3})) << "it is part of the next step";
  EXPECT_EQ(a.service.counts().version, 2u);
  EXPECT_EQ(a.service.counts().delays, (std::vector<std::int64_t>{4, 1}));
  for (int w : {2, 0, 3}) EXPECT_EQ(a.after_push(w, 3, 30), Workers{});
  EXPECT_EQ(a.after_push(1, 3, 31), (Workers{0, 1, 2, 3})) << "nobody is missing";
}

TEST(ShardService, AStepIsAsLateAsItsLatestGradient) {
  Alone a("quorum:1,grace=5+sa-asgd", 2);
  for (ExchangeId k : {1, 2, 3, 4}) a.after_push(0, k, 10.0 * double(k)), a.answered(10 * double(k) + 5);
  EXPECT_EQ(a.weight(), -4);
  EXPECT_EQ(a.after_push(1, 1, 50), Workers{});
  EXPECT_EQ(a.after_push(0, 5, 50), (Workers{0, 1}));
  EXPECT_EQ(a.weight(), -4.25);
}

TEST(ShardService, WhereFewerLiveThanTheQuorumItIsAllOfThem) {
  Alone a("quorum:3,grace=5+asgd", 4);
  a.service.lost(2), a.service.lost(3);
  EXPECT_EQ(a.after_push(0, 1), Workers{});
  EXPECT_EQ(a.after_push(1, 1), (Workers{0, 1}));
  EXPECT_EQ(a.after_push(0, 2), Workers{});
  a.service.idle(1, 1);
  EXPECT_EQ(a.answered(), Workers{0});
  EXPECT_EQ(a.after_push(1, 2), Workers{});
  a.service.lost(0);
  EXPECT_EQ(a.answered(), Workers{1});
  a.service.pull(3, 1, Tensor::zeros(*a.backend, {64}));  // it is back
  EXPECT_EQ(a.answered(), Workers{3});
  EXPECT_EQ(a.after_push(1, 3), Workers{});
  EXPECT_EQ(a.after_push(3, 2), (Workers{1, 3}));
}

TEST(ShardService, WhoIsLostIsNotOfTheQuorumAnyMore) {
  Alone a("quorum:2,grace=5+asgd", 3);
  a.after_push(0, 1, 0), a.after_push(1, 1, 0);
  EXPECT_EQ(a.service.due(), 5);
  a.service.lost(1);
  EXPECT_EQ(a.answered(6), Workers{});
  EXPECT_EQ(a.after_push(2, 1, 7), (Workers{0, 2}));
}

TEST(ShardService, AQuorumLeavesOutWhatIsRefusedAlone) {
  Alone a("quorum:2,grace=5+asgd", 3);
  EXPECT_EQ(a.after_push(0, 1), Workers{});
  EXPECT_EQ(a.after_push(1, 1, 0, NAN), Workers{1}) << "at once";
  EXPECT_EQ(a.told_refused, Workers{1});
  EXPECT_EQ(a.service.due(), never) << "it is not of the quorum";
  EXPECT_EQ(a.after_push(2, 1, 1, 3), Workers{});
  EXPECT_EQ(a.answered(6), (Workers{0, 2}));
  EXPECT_EQ(a.weight(), -2);
  EXPECT_EQ(a.service.counts().refused, (std::vector<std::int64_t>{0, 1, 0}));
  EXPECT_EQ(a.service.applied(), (std::vector<ExchangeId>{1, 1, 1}));
}

TEST(ShardService, WhoWaitsForAnotherShardIsNotWaitedFor) {
  Alone a("quorum:3,grace=5+asgd", 3);
  EXPECT_EQ(a.after_push(0, 2), Workers{});
  a.service.idle(1, 0, Pause::waits);
  EXPECT_EQ(a.answered(), Workers{});
  a.service.idle(2, 0, Pause::waits);
  EXPECT_EQ(a.answered(), Workers{0});
  a.service.idle(1, 0, Pause::answered);
  EXPECT_EQ(a.after_push(0, 3), Workers{});
  EXPECT_EQ(a.after_push(1, 2), (Workers{0, 1}));
  EXPECT_EQ(a.after_push(2, 2), Workers{});
  a.service.idle(0, 2, Pause::waits);  // it has pushed since
  a.service.idle(1, 2, Pause::waits);
  EXPECT_EQ(a.after_push(1, 3), Workers{});
  EXPECT_EQ(a.after_push(0, 4), (Workers{0, 1, 2}));
  EXPECT_EQ(a.after_push(0, 5), Workers{});
  EXPECT_EQ(a.after_push(2, 3), Workers{}) << "1 has pushed since, and is waited for again";
  a.service.idle(1, 3, Pause::idle);
  a.service.idle(1, 3, Pause::answered);
  EXPECT_EQ(a.answered(), (Workers{0, 2})) << "the second message was late";
}

TEST(ShardService, GoesOnWithTheCountsOfTheOwnerBefore) {
  Alone a("asgd");
  a.service.go_on(7, 9, {3, 0});
  EXPECT_EQ(a.after_push(0, 3), Workers{0}) << "it is in the weights already, and its worker is told";
  EXPECT_EQ(a.after_push(0, 4), Workers{0});
  EXPECT_EQ(a.rates_for, std::vector<std::int64_t>{9});
  EXPECT_EQ(a.service.counts().version, 8u);
}

TEST(Server, GradientsInHalfTheBytesArriveWhole) {
  std::vector<std::vector<double>> weights;
  for (DType wire : {DType::f32, DType::bf16}) {
    const Serving serving{.how = "asgd", .options = {.wire = wire}, .faults = {.shared_memory = false}};
    const auto ends = serve(2, serving, [](const Turn& t) { t.gradient.fill(1); });
    all_well(ends);
    weights.push_back(ends[0].weights);
  }
  EXPECT_EQ(weights[0], weights[1]);  // a one is one in both
}

TEST(Server, RunningStatisticsAreAWorkersShareOfTheDifference) {
  all_well(on_server(2, [&](Rank& rank, int) {
    rank.buffers.fill(1);
    rank.begin({.how = Asynchrony::parse("asgd")}, {0, 1});
    rank.train([&](std::int64_t) { rank.buffers.fill(3); });
    EXPECT_EQ(rank.buffers.values(), std::vector<double>(64, 2));  // half of the way from 1 to 3
  }));
}

TEST(Server, AStepThatIsRefusedForOneIsNobodys) {
  std::atomic<int> taken = 0;
  all_well(on_server(2, [&](Rank& rank, int r) {
    rank.begin({.how = Asynchrony::parse("bsp")}, {0, 12});
    rank.pull();
    while (const auto lease = rank.node.lease()) {
      rank.gradient.fill(*lease == 5 ? NAN : 1);  // in every shard
      taken += rank.push_and_pull({1, 1, 16});
    }
    rank.node.finish(whole(rank.weights), whole(rank.buffers));
    rank.node.gather("");
    EXPECT_EQ(rank.node.counts().shard.version, 5u) << "of six steps";
    EXPECT_EQ(rank.node.trained().samples, r == 0 ? 160 : 0);
  }));
  EXPECT_EQ(taken, 10);
}

TEST(Server, WhatIsRefusedLastCountsOnce) {
  const auto ends = serve(2, {.how = "asgd", .leases = 30}, [](const Turn& t) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    bowl(t);
    if (t.number >= 20) t.gradient.write<float>()[n - 1] = std::nanf("");
  });
  all_well(ends);
  EXPECT_EQ(ends[0].counts.refused + ends[1].counts.refused, 10);
  EXPECT_EQ(ends[1].counts.shard.version, 20u);
}

// One worker, whose gradients are never late, and who serves both shards.
TEST(Server, TheLearningRateFollowsWhatWasApplied) {
  std::vector<std::int64_t> asked;
  const auto rate = [&](std::int64_t pushes) {
    asked.push_back(pushes);
    return 0.1;
  };
  const auto ends = serve(1, {.how = "asgd", .options = {.learning_rate = rate}, .leases = 4}, bowl);
  std::erase_if(asked, [&, first = true](std::int64_t) mutable { return first = !first; });  // the statistics ask too
  EXPECT_EQ(asked, (std::vector<std::int64_t>{0, 1, 2, 3}));
  EXPECT_EQ(ends[0].counts.shard.delays, std::vector<std::int64_t>{4});
  EXPECT_EQ(ends[0].counts.shard.version, 4u);
}

// The events of a run that nobody could have foretold, given to shards that know nothing of threads and messages.
TEST(Server, ARecordedRunOfEveryRuleIsRepeatedToTheBit) {
  constexpr int ranks = 3;
  const auto cuts = shard_cuts(n, ranks);
  // dana-dc diverges in some orders at 0.1, and nothing equals what is not a number.
  const auto rate = [](std::int64_t pushes) { return 0.02 / double(1 + pushes / 20); };
  std::vector<std::string> all = rule_names();
  all.push_back("ssp:1+ddc-asgd");
  for (const std::string& strategy : all)
    for (bool shared : {true, false}) {
      SCOPED_TRACE(strategy);
      std::vector<std::vector<double>> gradients[ranks];
      ServerOptions o{.how = Asynchrony::parse(strategy), .learning_rate = rate, .record = true};
      const auto ends = serve(ranks, {.options = o, .leases = 45, .faults = {.delays = 3, .shared_memory = shared}},
                              [&](const Turn& t) {
                                bowl(t);
                                gradients[t.rank].push_back(t.gradient.values());
                              });
      all_well(ends);
      auto backend = reference_backend();
      for (std::size_t s = 0; s < ranks; s++) {
        const auto part = [&](const std::vector<double>& v) {
          return Tensor::of(*backend, {cuts[s + 1] - cuts[s]},
                            std::vector<double>(v.begin() + cuts[s], v.begin() + cuts[s + 1]), DType::f32);
        };
        const Tensor first = part(drawn(0));
        const auto rule = make_rule(o.how.rule);
        Shard shard(*rule, first, std::vector<RuleBlock>(std::size_t(first.numel() / 64)), ranks);
        std::int64_t pushes = 0;
        std::size_t pulls = 0;
        for (const ShardEvent& e : ends[s].events) {
          if (e.push)  // exchange 1 was a pull alone
            shard.push(e.worker, part(gradients[e.worker].at(std::size_t(e.exchange) - 2)), rate(pushes++), o.momentum);
          else
            shard.pull(e.worker, Tensor::like(first)), pulls++;
        }
        EXPECT_EQ(pushes, 45);
        const ShardCounts& counts = ends[s].counts.shard;
        EXPECT_EQ(counts.version, 45u);
        EXPECT_EQ(total(counts.delays), 45);
        EXPECT_EQ(total(counts.applied), 45);
        EXPECT_EQ(pulls, 45u + 2 * ranks);  // and each worker's first and last
        EXPECT_EQ(shard.values().values(), part(ends[0].weights).values()) << "shard " << s;
      }
    }
}

// ---- a shard alone --------------------------------------------------------------------------------------------------
TEST(Shard, NothingIsKeptOfAWorkerWhoseNumberIsAnothersNow) {
  auto backend = reference_backend(1);
  for (const std::string& name : rule_names()) {
    SCOPED_TRACE(name);
    const auto rule = make_rule(name);
    const Tensor g = Tensor::full(*backend, {64}, 1);
    Shard shard(*rule, Tensor::zeros(*backend, {64}), {RuleBlock{}}, 2);
    for (int worker : {0, 1, 0}) shard.pull(worker, Tensor::like(g)), shard.push(worker, g, 0.1, 0.9);
    shard.forget(1);
    const std::vector<Tensor> kept = shard.kept();
    const std::size_t shared = rule->keeps().velocity, each = (kept.size() - shared) / 2;  // vectors
    for (std::size_t k = 0; k < kept.size(); k++)
      EXPECT_EQ(kept[k].values()[0] == 0, k >= shared + each) << "vector " << k;
    EXPECT_EQ(shard.gap(1), 0);
    EXPECT_EQ(shard.push(1, g, 0.1, 0.9), 0);
  }
}

// ---- adoption -------------------------------------------------------------------------------------------------------
// Two servers, one of which dies: the gradients before were ones, those after it zeros, and the weights glide on.
TEST(Server, AnAdoptedShardKeepsItsMomentum) {
  auto channels = in_process_channels(3);
  std::atomic<bool> dies = false, dead = false;
  const auto said = ranks_say(3, [&](int r) {
    const std::shared_ptr<void> when_all_else_has_gone(nullptr, [&](void*) { dead = dead || r == 2; });
    Rank rank(std::move(channels[r]), n);
    rank.begin({.how = Asynchrony::parse("asgd-m"), .servers = 2, .momentum = 0.5, .snapshots = 0.002}, {0, 6});
    if (r == 2) {
      wait_until([&] { return dies.load(); });
      throw Killed("killed by the test");
    }
    rank.train([&](std::int64_t lease) {
      if (lease != 2) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(200));  // some snapshots
      dies = true;
      wait_until([&] { return dead.load(); });
      rank.gradient.fill(0);
    });
    rank.node.gather("");
    // v = 1, 1.5, 0.75, 0.375, …
    const std::vector<double> at = rank.weights.values();  // of the shard that stayed, and of the adopted one
    for (double w : {at.front(), at.back()}) EXPECT_EQ(w, r ? 0 : -(1 + 1.5 + 0.75 + 0.375 + 0.1875 + 0.09375));
    EXPECT_EQ(rank.node.counts().taken_over, r == 1 ? 1 : 0);
  });
  EXPECT_EQ(said[0], "");
  EXPECT_EQ(said[1], "");
}

// ---- waiting --------------------------------------------------------------------------------------------------------
// Rank 0 waits for rank 1 to begin, and rank 1 for what rank 0 says.
TEST(Server, WhereEverybodyWaitsThatIsAnError) {
  auto channels = in_process_channels(2);
  const auto said = ranks_say(2, [&](int r) {
    Rank rank(std::move(channels[r]), 2048, 0.5);
    if (r == 1) rank.node.gather("");
    rank.begin({.how = Asynchrony::parse("asgd")}, {0, 12});
    rank.pull();
  });
  all_say(said, {"for 0.5 s every rank has waited: rank 0 for the answer to a push: no answer from rank 1; rank 1 for "
                 "what all ranks say"});
}

// ---- snapshots ------------------------------------------------------------------------------------------------------
TEST(Server, WhatSnapshotsNeedIsSaidAndCheckedBefore) {
  const auto begins = [](const std::string& how, std::uint64_t memory) {
    auto channels = in_process_channels(2);
    std::string told;
    const auto said = ranks_say(2, [&](int r) {
      Rank rank(std::move(channels[r]), 1 << 20, 10, [&](const std::string& text) { told = text; });
      rank.begin({.how = Asynchrony::parse(how), .memory = memory}, {0, 0});
      if (r == 0) rank.pull();
      rank.node.finish(whole(rank.weights), whole(rank.buffers));
    });
    return std::pair(told, said);
  };
  auto [told, said] = begins("ddc-asgd", 30 << 20);
  all_well(said);
  // Of half the parameters, two vectors for each of two workers.
  EXPECT_EQ(
      told,
      "every 10 s a rank sends its successor a snapshot of 8.00 MiB, 819 KiB/s; they take 24.0 MiB of memory on each");
  EXPECT_EQ(begins("asgd", 1).first, "");
  all_say(begins("ddc-asgd", 5 << 20).second,
          {"snapshots of what ddc-asgd keeps of 2 workers need 24.0 MiB, and there are 5.00 MiB. Choose a rule"});
}

// ---- fenced ---------------------------------------------------------------------------------------------------------
// The owner of shard 1 is stopped when it has a push to apply, and wakes up when its successor has answered that.
TEST(Server, WhoWasGivenUpWritesNoAnswersAnyMore) {
  auto channels = in_process_channels(3);
  std::vector<std::unique_ptr<ServerLayout>> layouts;
  std::vector<std::unique_ptr<ShardServer>> owners;
  std::vector<std::optional<message::Pull>> requests(3);  // of shard 1
  for (auto& channel : channels) {
    layouts.push_back(std::make_unique<ServerLayout>(
        ServerOptions{.how = Asynchrony::parse("asgd"), .learning_rate = [](std::int64_t) { return 1.0; }}, 3,
        DType::f32, 3 * 1024, 0));
    owners.push_back(std::make_unique<ShardServer>(*layouts.back(), *channel, std::vector<RuleBlock>(48)));
    channel->share(64);  // so that the others know that they reach it
  }
  std::vector<float> w(3 * 1024), nothing(64);
  const Buffer weights{w.data(), 3 * 1024, DType::f32}, none{nothing.data(), 0, DType::f32};
  Worker worker(*layouts[0], *channels[0]);
  worker.keep_first(weights, none, {});
  for (std::size_t r = 0; r < 3; r++) {
    const auto arrived = [&, r](int, const MessageHeader& header, std::span<std::byte> bytes) {
      const Message m = unpacked(header);
      if (const auto* pull = std::get_if<message::Pull>(&m); pull && pull->shard == 1) requests[r] = *pull;
      if (const auto* answer = std::get_if<message::Answer>(&m)) worker.answered(*answer, bytes);
    };
    channels[r]->on_message({.place = [](int, const MessageHeader&, std::size_t) { return std::nullopt; },
                             .arrived = arrived,
                             .shared = arrived});
  }
  const auto deliver_all = [&] {
    for (auto& channel : channels)
      while (channel->progress()) {}
  };
  const auto serve = [&](int rank, float value) {
    std::vector<std::byte> bytes(layouts[0]->copy_bytes(1));
    for (std::size_t i = 0; i < 4096; i += 4) std::memcpy(bytes.data() + i, &value, 4);
    owners[rank]->take_over(1);
    for (int r = 0; r < 3; r++) owners[rank]->offered(r, {{1}, r == 0});
    owners[rank]->copied(0, {{1}}, bytes);
  };
  const auto shard_1 = [&] {
    worker.copy_answers(weights, none);
    return std::pair(w[1024], w[2047]);
  };
  serve(1, 5), serve(2, 7);
  worker.start({});
  deliver_all();
  const message::Pull to_1 = requests[1].value();
  layouts[0]->owner[1] = 2;
  worker.owner_changed(1);
  deliver_all();
  owners[2]->pull(0, requests[2].value());
  deliver_all();
  EXPECT_EQ(shard_1(), std::pair(7.f, 7.f));
  owners[1]->pull(0, to_1);
  EXPECT_EQ(shard_1(), std::pair(7.f, 7.f)) << "the one that was given up has written";
}

}  // namespace
}  // namespace tandem::test
