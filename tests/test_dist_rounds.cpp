// Rounds on in-process ranks: what K ranks compute is what a loop over K models computes that was written by hand.
#include <limits>

#include "dist/lab/simulator.h"
#include "tests/host_ranks.h"

namespace tandem::test {
namespace {

template <class Model = Plain>
std::vector<Ended> trained(int n, const std::string& strategy, const OwnLoop& o, std::int64_t bucket_bytes = 0) {
  auto runs = on_ranks(n, strategy, [&](Strategy& s, Ended& run) { train<Model>(s, run, o); },
                       {.rounds = {.bucket_bytes = bucket_bytes, .deadline = 30}});
  same_bits(runs);
  return runs;
}

MakeOptimizer sgd(const SGDOptions& options) {
  return [=] { return std::make_unique<SGD>(options); };
}
std::unique_ptr<Optimizer> adamw() { return std::make_unique<AdamW>(AdamWOptions{.learning_rate = 0.01}); }

// ---- by hand --------------------------------------------------------------------------------------------------------
using Until = std::function<std::int64_t(std::int64_t step)>;
Until every(std::int64_t steps) {
  return [=](std::int64_t) { return steps; };
}

// K models, each with an optimizer of its own, and a share of every batch.
template <class Model>
struct Machines {
  struct Machine {
    std::unique_ptr<Loader> source;
    Model model;
    std::unique_ptr<FlatParameters> flat;
    std::unique_ptr<Optimizer> optimizer;
    Numbers x() const { return flat->values.values(); }
    void x(const Numbers& v) {
      flat->values.copy_from(Tensor::of(flat->backend(), flat->values.shape(), v, DType::f64));
      flat->count_writes(flat->all());
    }
  };
  std::unique_ptr<Backend> backend = reference_backend(1);
  Dataset data = odd_number_of_pictures();
  std::vector<Machine> all;

  Machines(int n, const OwnLoop& o) : all(std::size_t(n)) {
    for (int r = 0; r < n; r++) {
      Machine& m = all[r];
      m.source = std::make_unique<Loader>(
          data.train, LoaderOptions{.batch = o.global_batch, .seed = 5, .rank = r, .world = n, .prefetch = 0},
          *backend);
      m.flat = std::make_unique<FlatParameters>(m.model, *backend, 100, FlatMemory{}, DType::f64);
      m.optimizer = o.optimizer();
      m.optimizer->clip_norm = o.clip;
      m.optimizer->bind(*m.flat);
    }
  }
  // A step of each. False at the end of the epoch.
  bool step(double rate) {
    for (Machine& m : all) {
      Batch batch;
      if (!m.source->next(batch)) return false;
      if (rate > 0) m.optimizer->learning_rate(rate);
      m.flat->zero_gradients();
      Variable x(batch.images.cast(DType::f64));
      Variable loss = cross_entropy(m.model(x), batch.labels);
      m.flat->backward(loss, double(all.size()) * double(batch.size()) / double(batch.over_ranks()));
      m.optimizer->step(&loss.value());
    }
    return true;
  }
  Numbers mean() const {
    Numbers sum = all[0].x();
    for (std::size_t k = 1; k < all.size(); k++) {
      const Numbers x = all[k].x();
      for (std::size_t i = 0; i < sum.size(); i++) sum[i] += x[i];
    }
    for (double& v : sum) v /= double(all.size());
    return sum;
  }
  void set(const Numbers& x) {
    for (Machine& m : all) m.x(x);
  }
  // The steps of `o`, with an exchange after until(step) of them; and ended(steps since) at the end of an epoch.
  void run(const OwnLoop& o, const Until& until, const std::function<void()>& exchange,
           const std::function<void(std::int64_t made)>& ended) {
    std::int64_t made = 0, done = 0;
    for (int epoch = 0; done < o.steps; epoch++) {
      for (Machine& m : all) m.source->start(epoch);
      while (done < o.steps && step(o.rate ? o.rate(double(done)) : 0)) {
        if (++made < until(done++)) continue;
        exchange();
        made = 0;
      }
      ended(std::exchange(made, 0));
    }
  }
};

// The weights after so many steps, of which `until(step)` lie between exchanges; an exchange ends every epoch. What it
// gives is the mean, or what an outer optimizer makes of it, Nesterov's: Δ = θ − mean; m = β·m + Δ; θ −= γ(Δ + β·m).
template <class Model = Plain>
Numbers local_sgd_by_hand(int n, const OwnLoop& o, const Until& until, const OuterRates& outer = {0, 1}) {
  Machines<Model> machines(n, o);
  Numbers theta = machines.mean(), m(theta.size());
  auto exchange = [&] {
    const Numbers mean = machines.mean();
    for (std::size_t i = 0; i < m.size(); i++) {
      const double delta = theta[i] - mean[i];
      m[i] = outer.momentum * m[i] + delta;
      theta[i] -= outer.learning_rate * (delta + outer.momentum * m[i]);
    }
    machines.set(theta);
  };
  machines.run(o, until, exchange, [&](std::int64_t made) {
    if (made > 0) exchange();
  });
  return machines.mean();
}

Numbers cocod_by_hand(int n, const OwnLoop& o, std::int64_t steps) {
  Machines<Plain> machines(n, o);
  Numbers mean = machines.mean();  // of what was sent
  std::vector<Numbers> sent(std::size_t(n), mean);
  auto exchange = [&] {
    for (std::size_t r = 0; r < sent.size(); r++) {
      Numbers x = machines.all[r].x();
      for (std::size_t i = 0; i < x.size(); i++) x[i] = mean[i] + (x[i] - sent[r][i]);
      machines.all[r].x(x);
      sent[r] = x;
    }
    mean = machines.mean();
  };
  machines.run(o, every(steps), exchange, [&](std::int64_t) {
    exchange();
    machines.set(mean);
    sent.assign(std::size_t(n), mean);
  });
  return machines.mean();
}

Numbers easgd_by_hand(int n, const OwnLoop& o, std::int64_t steps) {
  Machines<Plain> machines(n, o);
  Numbers z = machines.mean();
  auto exchange = [&] {
    Numbers pulls(z.size());
    for (auto& m : machines.all) {
      Numbers x = m.x();
      for (std::size_t i = 0; i < x.size(); i++) {
        const double pull = 0.9 / n * (x[i] - z[i]);
        x[i] -= pull, pulls[i] += pull;
      }
      m.x(x);
    }
    for (std::size_t i = 0; i < z.size(); i++) z[i] += pulls[i];
  };
  machines.run(o, every(steps), exchange, [&](std::int64_t made) {
    if (made > 0) exchange();
    if (!o.begins_epochs) machines.set(z);
  });
  return z;
}

// ---- what is computed -----------------------------------------------------------------------------------------------
TEST(LocalSgd, OneStepBetweenExchangesIsAllReduce) {
  for (int n : {2, 3, 4})
    for (double momentum : {0.0, 0.9}) {  // the mean of velocities is the velocity of the mean
      const OwnLoop o{.global_batch = 48, .steps = 12, .optimizer = sgd({.learning_rate = 0.1, .momentum = momentum})};
      const auto want = trained(n, "all-reduce", o)[0].weights;
      EXPECT_LE(furthest(trained(n, "local-sgd:1", o)[0].weights, want), 1e-12) << n << " ranks, " << momentum;
      EXPECT_GT(furthest(trained(n, "local-sgd:2", o)[0].weights, want), 1e-6) << n << " ranks, " << momentum;
    }
}

TEST(LocalSgd, StepsOfTheirOwnAreALoopByHand) {
  const std::vector<std::pair<std::string, MakeOptimizer>> optimizers = {
      {"sgd", sgd({.learning_rate = 0.1})},
      {"momentum", usual_sgd},
      {"nesterov", sgd({.learning_rate = 0.1, .momentum = 0.9, .nesterov = true, .weight_decay = 1e-3})},
      {"adamw", adamw},
      {"lars", [] { return std::make_unique<LARS>(LARSOptions{}); }}};
  for (const auto& [name, optimizer] : optimizers)
    for (int n : {2, 3})
      for (std::int64_t steps : {1, 3, 8})
        for (auto [clip, tolerance] : {std::pair{0.0, 1e-12}, {0.5, 1e-6}}) {  // what is clipped away is found in f32
          const OwnLoop o{.global_batch = 42, .steps = 13, .clip = clip, .optimizer = optimizer};
          const auto want = local_sgd_by_hand(n, o, every(steps));
          const auto got = trained(n, "local-sgd:" + std::to_string(steps), o, 4096);
          EXPECT_LE(furthest(got[0].weights, want), tolerance) << name << ", " << n << " ranks, " << steps << " steps";
        }
}

TEST(LocalSgd, WithAnOuterOptimizerToo) {
  for (int n : {1, 2, 3})
    for (const MakeOptimizer& optimizer : {MakeOptimizer(usual_sgd), MakeOptimizer(adamw)}) {
      const OwnLoop o{.steps = 23, .optimizer = optimizer};  // five steps an epoch: two, two, and one at its end
      const auto want = local_sgd_by_hand(n, o, every(2), {.momentum = 0.8, .learning_rate = 0.6});
      EXPECT_LE(furthest(trained(n, "outer:H=2,momentum=0.8,lr=0.6", o)[0].weights, want), 1e-12) << n << " ranks";
      EXPECT_GT(furthest(trained(n, "local-sgd:2", o)[0].weights, want), 1e-4) << n << " ranks";
    }
}

TEST(LocalSgd, BatchNormLeavesWeightsAsByHandAndStatisticsMerged) {
  const OwnLoop o{.global_batch = 42, .steps = 12};
  const auto runs = trained<Odd>(3, "local-sgd:4", o);
  EXPECT_LE(furthest(runs[0].weights, local_sgd_by_hand<Odd>(3, o, every(4))), 1e-12);
}

TEST(LocalSgd, AccumulatedBatchesAreOneStep) {
  // Four batches of 24 to a step are, without batch norm, one of 96.
  const OwnLoop small{.global_batch = 24, .steps = 8, .accumulate = 4}, large{.global_batch = 96, .steps = 8};
  EXPECT_LE(furthest(trained(3, "local-sgd:1", small)[0].weights, trained(3, "all-reduce", large)[0].weights), 1e-6);
}

TEST(LocalSgd, CocodAddsWhatWasDoneSinceToTheMean) {
  for (int n : {2, 3})
    for (std::int64_t steps : {1, 2, 3, 8}) {
      const OwnLoop o{.global_batch = 24, .steps = 25};  // nine batches an epoch
      const auto got = trained(n, "cocod-sgd:" + std::to_string(steps), o, 4096);
      EXPECT_LE(furthest(got[0].weights, cocod_by_hand(n, o, steps)), 1e-12) << n << " ranks, " << steps << " steps";
    }
}

TEST(LocalSgd, EasgdDrawsRanksAndTheirCentreTogether) {
  for (int n : {2, 3})
    for (std::int64_t steps : {1, 2, 3, 8})
      for (bool begins : {true, false}) {
        const OwnLoop o{.global_batch = 24, .steps = 25, .begins_epochs = begins};
        const auto got = trained(n, "easgd:" + std::to_string(steps), o, 4096);
        EXPECT_LE(furthest(got[0].weights, easgd_by_hand(n, o, steps)), 1e-12) << n << " ranks, " << steps << " steps";
      }
}

TEST(LocalSgd, PostLocalSgdBeginsWithTheFirstDecay) {
  auto by_hand = [](const OwnLoop& o, std::int64_t from) {
    return local_sgd_by_hand(2, o, [=](std::int64_t step) { return step < from ? 1 : 4; });
  };
  const std::vector<std::pair<std::function<double(double)>, std::int64_t>> rates = {
      {[](double s) { return s < 7 ? 0.1 : 0.01; }, 7},  // in steps
      {[](double s) { return s < 3   ? 0.02 * (s + 1)
                             : s < 8 ? 0.1
                                     : 0.08; }, 8},  // after a warm-up
      {[](double s) { return 0.05 * (1 + std::cos(3.1415926 * s / 60)); }, 31},   // to half of the largest
      {[](double) { return 0.1; }, 10}};                                          // never: half of the run
  for (const auto& [rate, from] : rates) {
    const OwnLoop o{.global_batch = 24, .steps = from > 20 ? 60 : 20, .rate = rate, .of = from > 20 ? 60 : 20};
    const auto got = trained(2, "post-local-sgd:4", o)[0].weights;
    EXPECT_LE(furthest(got, by_hand(o, from)), 1e-11) << from;
    EXPECT_GT(furthest(got, by_hand(o, from - 2)), 1e-9) << from;
    EXPECT_GT(furthest(got, by_hand(o, from + 2)), 1e-9) << from;
  }
  // A loop that says nothing of its rates is told so.
  all_say(on_ranks(2, "post-local-sgd:4", [](Strategy& s, Ended& run) { train<Plain>(s, run, {}); }),
          {"call begin_epoch()"});
}

TEST(LocalSgd, AResumedRunKnowsWhetherTheRateHasDecayed) {
  for (auto [done, between] : {std::pair{0, 1}, {48, 2}}) {
    const OwnLoop o{.steps = 5, .rate = [](double step) { return step < 48 ? 0.1 : 0.01; }, .done = done, .of = 100};
    OwnLoop first = o;  // of which the machines by hand know nothing else
    first.rate = [&, done = done](double step) { return o.rate(step + double(done)); };
    EXPECT_LE(furthest(trained(2, "post-local-sgd:2", o)[0].weights, local_sgd_by_hand(2, first, every(between))),
              1e-12);
  }
}

TEST(LocalSgd, OneRankIsOneMachineBitForBit) {
  for (const char* strategy : {"local-sgd:3", "post-local-sgd:3", "cocod-sgd:3", "easgd:3"}) {
    Ended whole;
    Strategy one;
    const OwnLoop o{.steps = 12, .rate = [](double step) { return step < 6 ? 0.1 : 0.02; }, .of = 12};
    train<Odd>(one, whole, o);
    const auto runs = trained<Odd>(1, strategy, o);
    EXPECT_TRUE(runs[0].weights == whole.weights) << strategy;
    EXPECT_TRUE(runs[0].buffers == whole.buffers) << strategy;
  }
}

TEST(Outer, WithoutMomentumItIsLocalSgdToTheBit) {
  for (int n : {2, 3})
    for (std::int64_t steps : {1, 3, 8})
      for (const MakeOptimizer& optimizer : {MakeOptimizer(usual_sgd), MakeOptimizer(adamw)}) {
        const OwnLoop o{.steps = 13, .optimizer = optimizer};
        const std::string h = std::to_string(steps);
        const auto local = trained<Odd>(n, "local-sgd:" + h, o),
                   mine = trained<Odd>(n, "outer:momentum=0,lr=1,H=" + h, o);
        EXPECT_TRUE(mine[0].weights == local[0].weights) << n << " ranks, " << h << " steps";
        EXPECT_TRUE(mine[0].buffers == local[0].buffers)
            << n << " ranks, " << h << " steps";  // running statistics, merged
        EXPECT_TRUE(mine[0].epochs == local[0].epochs) << n << " ranks, " << h << " steps";
      }
}

TEST(Outer, OneFragmentThatIsWaitedForIsThePlainOne) {
  const OwnLoop o{.global_batch = 24, .steps = 25};
  for (int n : {2, 3})
    EXPECT_TRUE(trained<Odd>(n, "outer:H=4,stream=1,overlap=0", o)[0].weights ==
                trained<Odd>(n, "outer:H=4", o)[0].weights);
}

// Fragments in turn, each merged `overlap` steps after it was sent: a loop by hand over two models.
TEST(Outer, FragmentsKeepWhatWasDoneSinceTheyWereSent) {
  const double beta = 0.5, gamma = 0.75;
  const int n = 2, fragments = 2, steps = 6, between = 3;
  for (int overlap : {1, 2, 3}) {
    const OwnLoop o{.global_batch = 24, .steps = 17};  // nine batches an epoch
    Machines<Plain> machines(n, o);
    Numbers theta = machines.mean(), m(theta.size());
    std::vector<Numbers> sent;
    const auto half = std::int64_t(theta.size()) / fragments / FlatParameters::cut * FlatParameters::cut;
    const Range ranges[] = {{0, half}, {half, std::int64_t(theta.size())}, {0, std::int64_t(theta.size())}};
    Range range{};
    int left = 0, made = 0;
    auto send = [&](int which) {
      range = ranges[which];
      left = overlap;
      sent.clear();
      for (auto& machine : machines.all) sent.push_back(machine.x());
    };
    auto merge = [&] {
      left = 0;
      std::vector<Numbers> x;
      for (auto& machine : machines.all) x.push_back(machine.x());
      for (auto i = std::size_t(range.begin); i < std::size_t(range.end); i++) {
        const double delta = theta[i] - (sent[0][i] + sent[1][i]) / 2;
        m[i] = beta * m[i] + delta;
        theta[i] -= gamma * (delta + beta * m[i]);
        for (std::size_t r = 0; r < x.size(); r++) x[r][i] = theta[i] + (x[r][i] - sent[r][i]);
      }
      for (std::size_t r = 0; r < x.size(); r++) machines.all[r].x(x[r]);
    };
    const auto stepped = [&] {
      made++;
      if (left > 0 && --left == 0) merge();
      if (made % between == 0) send(made % steps == 0 ? 1 : 0);
    };
    machines.run(o, every(1), stepped, [&](std::int64_t) {
      if (left > 0) merge();
      send(2);
      merge();
      made = 0;
    });
    const std::string name = "outer:H=6,stream=2,momentum=0.5,lr=0.75,overlap=" + std::to_string(overlap);
    const auto got = trained(n, name, o);
    EXPECT_LE(furthest(got[0].weights, theta), 1e-12) << name;
    if (overlap < between) continue;  // which is what is done where `overlap` is not given
    EXPECT_TRUE(got[0].weights == trained(n, "outer:H=6,stream=2,momentum=0.5,lr=0.75", o)[0].weights);
  }
}

// The simulator deals batches out one by one; with batches that divide evenly its workers get what the ranks do.
TEST(LocalSgd, TheSimulatorComputesTheSame) {
  const Dataset data = synthetic({.side = 8, .channels = 1, .train = 240, .test = 10, .seed = 3});
  const SGDOptions given{.learning_rate = 0.05, .momentum = 0.9, .weight_decay = 5e-4};
  for (const char* strategy : {"local-sgd:5", "post-local-sgd:5", "cocod-sgd:5"}) {
    const bool cocod = std::string(strategy).starts_with("cocod");
    const int epochs = cocod ? 1 : 3;  // ten batches each; the simulator has no exchange at the end of an epoch
    auto backend = reference_backend(1);
    Loader batches(data.train, {.batch = 8, .seed = 5, .prefetch = 0}, *backend);
    Plain simulated;
    SimulatorOptions options{.strategy = strategy, .epochs = epochs, .progress = false};
    options.schedule = Schedule::parse("step:1:0.1");
    options.cluster.workers = 3, options.cluster.compute = 1, options.cluster.shape = 0;
    simulate(simulated, cross_entropy_loss(), given, *backend, {batches, nullptr, nullptr}, options);
    const auto runs = on_ranks(3, strategy, [&](Strategy& s, Ended& run) {
      SGD sgd(given);
      const LoaderOptions share{.batch_per_rank = 8, .seed = 5, .prefetch = 0};
      const RunConfig o{.epochs = epochs, .schedule = "step:1:0.1", .progress = false};
      fit_model<Plain>(s, run, data, share, sgd, o, *reference_backend(1));
    });
    same_bits(runs);
    EXPECT_LE(furthest(runs[0].weights, parameter_values(simulated)), 2e-6) << strategy;
  }
}

// ---- the whole loop -------------------------------------------------------------------------------------------------
// On two hosts where the number of ranks is 4.
TEST(Replicas, FitEndsWithTheSameOnEveryRank) {
  const std::vector<int> few{2, 3}, hosts{4};
  for (const std::string strategy :
       {"all-reduce", "local-sgd:4", "post-local-sgd:4", "cocod-sgd:4", "easgd:4", "outer:H=3", "outer:H=4,stream=2",
        "outer:H=qsr:0.2:3", "local-sgd:qsr:0.2:3", "daso:B=2,warm-up=1,cool-down=1"})
    for (double ema : {0.0, 0.9})
      for (int n : strategy.starts_with("daso") ? hosts : few)
        same_bits(on_ranks(n, strategy, [&](Strategy& s, Ended& run) {
          fit_on(s, run, {.epochs = 4, .progress = false, .ema = ema});
        }));
}

// The outer momentum is in the checkpoint. The inner optimizer has none, since only rank 0's would be.
TEST(Outer, ARunGoesOnBitForBit) {
  auto run_on = [](int epochs, const std::string& checkpoint, const std::string& resume, const std::string& strategy) {
    auto runs = on_ranks(2, strategy, [&](Strategy& s, Ended& run) {
      SGD sgd({.learning_rate = 0.05});
      const LoaderOptions batches{.batch = 24, .seed = 2, .prefetch = 0};
      const RunConfig o{.epochs = epochs, .progress = false, .checkpoint = checkpoint, .resume = resume};
      fit_model<Plain>(s, run, odd_number_of_pictures(), batches, sgd, o, *reference_backend(1));
    });
    same_bits(runs);
    return runs[0].weights;
  };
  for (const char* strategy : {"outer:H=4", "outer:H=4,stream=2"}) {
    TemporaryFolder folder;
    const Numbers whole = run_on(4, "", "", strategy);
    run_on(2, folder.file("run"), "", strategy);
    EXPECT_TRUE(run_on(4, "", folder.file("run"), strategy) == whole) << strategy;
    // A run of another strategy has no use for the momentum, and one that was another's begins without.
    TemporaryFolder again, other;
    run_on(2, again.file("run"), "", strategy);
    EXPECT_FALSE(run_on(4, "", again.file("run"), "local-sgd:4") == whole);
    run_on(2, other.file("run"), "", "local-sgd:4");
    EXPECT_FALSE(run_on(4, "", other.file("run"), strategy) == whole);
  }
}

TEST(LocalSgd, AStepIsOneRanksOwn) {
  on_ranks(4, "local-sgd:8", [](Strategy& s, Ended&) { EXPECT_EQ(s.ranks().per_step, 1); });
}

TEST(Replicas, OneRanksWishStopsAllAtTheSameExchange) {
  for (auto [strategy, ranks, steps] : {std::tuple{"all-reduce", 3, 18},
                                        {"local-sgd:3", 3, 3},
                                        {"post-local-sgd:3", 3, 3},
                                        {"cocod-sgd:3", 3, 6},
                                        {"easgd:3", 3, 6},
                                        {"outer:H=3", 3, 3},
                                        {"outer:H=6,stream=2", 3, 6},
                                        {"daso:B=2,warm-up=0,cool-down=0", 4, 6}}) {
    const auto runs = on_ranks(ranks, strategy, [](Strategy& s, Ended& run) {
      fit_on(s, run, quiet(50), [&](Batch&, std::int64_t made) {
        if (made == 21 && s.rank() == 1) s.request_stop();
      });
    });
    same_bits(runs);
    for (const Ended& run : runs) {
      EXPECT_GE(run.loss, 21) << strategy;
      EXPECT_LE(run.loss, 21 + steps) << strategy;
      EXPECT_EQ(run.loss, runs[0].loss) << strategy;
    }
  }
}

TEST(Replicas, ALossThatIsNotFiniteOnOneRankStopsAll) {
  for (const std::string strategy : {"local-sgd:3", "local-sgd:100", "post-local-sgd:3", "cocod-sgd:3", "cocod-sgd:100",
                                     "easgd:3", "easgd:100", "daso:B=4,warm-up=0,cool-down=0"})
    for (int culprit : {0, 2}) {
      const bool hosts = strategy.starts_with("daso");  // whose ranks make a step together
      const auto runs = on_ranks(hosts ? 4 : 3, strategy, [&](Strategy& s, Ended& run) {
        fit_on(s, run, quiet(3), [&](Batch& batch, std::int64_t) {
          if (s.rank() == culprit && batch.epoch == 1 && batch.index == 2)
            batch.images.fill(std::numeric_limits<double>::infinity());
        });
      });
      all_say(runs, {"not finite"});
      for (int r = 0; r < 3 && !hosts; r++) {
        const std::string own = "step 8 (epoch 2, batch 3): the loss or its gradient is not finite: the input pictures";
        const std::string others = "not finite: it was so on rank " + std::to_string(culprit);
        EXPECT_TRUE(holds(runs[r].said, {r == culprit ? own + " hold" : others})) << strategy;
      }
    }
}

// What the first of two ranks says in the end of its exchanges.
std::map<std::string, double> measured(const std::string& strategy, const OwnLoop& o) {
  std::map<std::string, double> all;
  same_bits(on_ranks(2, strategy, [&](Strategy& s, Ended& run) {
    train<Plain>(s, run, o);
    if (s.rank() > 0) return;
    for (const auto& [name, value] : s.end()) all[name] = value;
  }));
  return all;
}

TEST(LocalSgd, FewerBytesTravel) {
  auto sent = [](const std::string& strategy) {
    const auto all = measured(strategy, {.global_batch = 2, .steps = 96});
    EXPECT_GE(all.at("hidden_share"), 0);
    EXPECT_GT(all.at("exchange_seconds"), 0);
    return all.at("sent_bytes");
  };
  const double always = sent("all-reduce");
  for (const char* strategy : {"local-sgd:8", "cocod-sgd:8", "easgd:8"}) {
    const double ratio = always / sent(strategy);
    EXPECT_GT(ratio, 6.5) << strategy;  // with the first weights, an exchange at the end, and a comparison
    EXPECT_LT(ratio, 8.5) << strategy;
  }
}

TEST(LocalSgd, WhatDoesNotFitIsRefused) {
  const auto synchronous = [](Strategy& s, Ended& run) {
    fit_on(s, run, {.progress = false, .sync_batch_norm = true});
  };
  all_say(on_ranks(2, "local-sgd:4", synchronous), {"--sync-bn with local-sgd:4"});
  const auto different = [](Strategy& s, Ended& run) {
    s.rank() == 0 ? train<Plain>(s, run, {}) : train<Odd>(s, run, {});
  };
  for (const char* strategy : {"all-reduce", "local-sgd:4"})
    all_say(on_ranks(2, strategy, different), {"rank 0 and rank 1 do not train the same model"});
}

TEST(RoundSteps, NamesAreRead) {
  for (const char* name : {"local-sgd:3", "post-local-sgd:12", "cocod-sgd:1", "easgd:8",
                           "outer:H=100,momentum=0.9,lr=0.7", "outer:H=30,momentum=0,lr=1,stream=3",
                           "outer:H=30,momentum=0,lr=1,stream=3,overlap=4", "outer:H=qsr:0.2:50,momentum=0.9,lr=0.7"})
    EXPECT_EQ(RoundSteps::parse(name)->name(), name);
  EXPECT_EQ(RoundSteps::parse("cocod-sgd")->name(), "cocod-sgd:8");
  EXPECT_EQ(RoundSteps::parse("outer")->name(), "outer:H=100,momentum=0.5,lr=0.7");
  for (const char* other : {"all-reduce", "local-sgd8", "outers"}) EXPECT_FALSE(RoundSteps::parse(other)) << other;
  for (auto [wrong, says] : {std::pair{"local-sgd:0", "STEPS, from 1"},
                             {"local-sgd:", "STEPS, from 1"},
                             {"local-sgd:8x", "STEPS, from 1"},
                             {"cocod-sgd:-1", "STEPS, from 1"},
                             {"outer:H=0", "H is STEPS, from 1"},
                             {"outer:", "H is STEPS"},
                             {"outer:h=3", "choose H="},
                             {"outer:momentum=1", "momentum is a number from 0"},
                             {"outer:lr=", "lr is a number from"},
                             {"outer:H=3,stream=4", "4 fragments"},
                             {"outer:H=9,stream=3,overlap=4", "at most 3"}})
    EXPECT_TRUE(refused([&, wrong = wrong] { RoundSteps::parse(wrong); }, {says})) << wrong;
}

TEST(Interval, GrowsAsTheRateDecays) {
  const Interval every = *Interval::parse("qsr:0.2:4", 8);
  EXPECT_EQ(every.name(), "qsr:0.2:4");
  EXPECT_EQ(Interval::parse("qsr:0.2", 8)->steps, 8);
  EXPECT_EQ(Interval::parse("7", 8)->at(0.1, 0, {}), 7);
  EXPECT_EQ(every.at(0.4, 0, {}), 4);
  EXPECT_EQ(every.at(0.1, 0, {}), 4);      // (0.2/0.1)² = 4, or 3.99…: never below the base
  EXPECT_EQ(every.at(0.0625, 0, {}), 10);  // 10.24
  EXPECT_GT(every.at(0, 0, {}), 1000000);  // an epoch ends it
  // A warm-up counts as the rate that it reaches.
  const RunPlan plan{.epochs = 2, .steps_per_epoch = 50, .learning_rate = [](double s) {
                       return s < 10 ? 0.01 * (s + 1) : 0.1 * (1 - s / 100);
                     }};
  EXPECT_EQ(every.at(plan.learning_rate(0), 0, plan), 4);
  EXPECT_EQ(every.at(plan.learning_rate(80), 80, plan), 100);
  for (const char* wrong : {"", "0", "-1", "qsr", "qsr:", "qsr:0", "qsr:x:3", "qsr:0.2:", "qsr:0.2:0", "qsr:0.2:3x"})
    EXPECT_FALSE(Interval::parse(wrong, 8)) << wrong;
}

// Rounds under the rule: as many exchanges as by hand, counted in bytes.
TEST(Interval, RoundsGrow) {
  auto rate = [](double step) { return step < 8 ? 0.1 : 0.05; };            // (0.2/η)²: 4, then 16
  const OwnLoop o{.global_batch = 8, .steps = 26, .rate = rate, .of = 26};  // 27 batches an epoch
  auto sent = [&](const std::string& strategy) { return measured(strategy, o).at("sent_bytes"); };
  const double fixed = sent("local-sgd:26"), one = sent("local-sgd:13") - fixed;  // one: an exchange
  for (const char* strategy :
       {"local-sgd:qsr:0.2001:2", "outer:H=qsr:0.2001:2"})  // after 4, 8 and 24 steps, and at the end of the epoch
    EXPECT_NEAR((sent(strategy) - fixed) / one, 3, 0.05) << strategy;
}

TEST(Replicas, ARankThatDiesStopsTheOthers) {
  for (const char* strategy :
       {"all-reduce", "local-sgd:3", "cocod-sgd:3", "easgd:3", "outer:H=3", "outer:H=6,stream=2"})
    for (std::int64_t at : {3, 20, 77}) {
      Outcome outcome;
      const auto runs = on_ranks(3, strategy, [](Strategy& s, Ended& run) { train<Odd>(s, run, {.steps = 30}); },
                                 {.wire = {.deadline = 30, .fault = {Fault::Kind::killed, at}, .outcome = &outcome}});
      all_name(runs, outcome.faulty);
    }
}

// What it writes is a run after a whole number of steps, also where the step was made before its exchange failed.
TEST(LocalSgd, WhatIsLeftOfARunGoesOnWhereItWas) {
  for (const char* strategy : {"local-sgd:3", "cocod-sgd:3", "easgd:3"})
    for (std::int64_t at = 300; at < 360; at += 15) {  // in exchanges, and in what follows an epoch
      TemporaryFolder folder;
      Outcome outcome;
      const InProcessOptions wire{.deadline = 30, .fault = {Fault::Kind::killed, at}, .outcome = &outcome};
      const auto body = [&](Strategy& s, Ended& run) {
        fit_on(s, run, {.epochs = 1000, .progress = false, .checkpoint = folder.file("run")});
      };
      const std::string said = stderr_of([&] { on_ranks(3, strategy, body, {.wire = wire}); });
      EXPECT_TRUE(holds(said, {"rank " + std::to_string(outcome.faulty == 0 ? 1 : 0) + " has written"}));
      const std::string file = folder.file("run/last.safetensors");
      auto backend = reference_backend(1);
      Odd model;
      FlatParameters flat(model, *backend, 1);
      BoundSgd sgd(flat, {.learning_rate = 0.05, .momentum = 0.9});
      const RunPosition there = load_checkpoint(file, {flat, sgd});
      EXPECT_EQ(sgd.read_state().step, std::uint64_t(there.step)) << strategy << ", message " << at;
      EXPECT_EQ(there.epoch * there.batches + there.batch, there.step) << strategy << ", message " << at;
      EXPECT_GT(there.step, 3);
    }
}

}  // namespace
}  // namespace tandem::test
