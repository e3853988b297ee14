// Steps of their own on in-process ranks: what K ranks compute is what a loop over K models computes that was written
// by hand.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <utility>

#include "dist/lab/simulator.h"
#include "dist/strategies/all_reduce.h"
#include "dist/strategies/averages.h"
#include "dist/strategies/rounds.h"
#include "layers/train/checkpoint.h"
#include "tests/replicas.h"

namespace tandem::test {
namespace {

std::vector<Ended> on_ranks(int n, const std::string& strategy, const std::function<void(Strategy&, Ended&)>& body,
                            const RoundsOptions& options = {}, const InProcessOptions& wire = {.deadline = 30}) {
  return on_ranks(
      n,
      [&](std::unique_ptr<Communicator> ranks) {
        const auto how = RoundSteps::parse(strategy);
        return how ? rounds(std::move(ranks), *how, options) : all_reduce(std::move(ranks));
      },
      body, wire);
}

template <class Model = Plain>
std::vector<Ended> trained(int n, const std::string& strategy, const OwnLoop& o, const RoundsOptions& options = {}) {
  auto runs = on_ranks(
      n, strategy, [&](Strategy& s, Ended& run) { train<Model>(s, run, o); }, options);
  same_bits(runs);
  return runs;
}

MakeOptimizer sgd(const SGDOptions& options) {
  return [=] { return std::make_unique<SGD>(options); };
}

// ---- by hand --------------------------------------------------------------------------------------------------------
using Numbers = std::vector<double>;

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
      Machine& m = all[std::size_t(r)];
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
};

// The weights after so many steps, of which `until(step)` lie between exchanges; an exchange ends every epoch. What it
// gives is the mean, or what an outer optimizer makes of it: Δ = θ − mean; m = β·m + Δ; θ −= γ(Δ + β·m).
template <class Model = Plain>
Numbers local_sgd_by_hand(int n, const OwnLoop& o, const std::function<std::int64_t(std::int64_t)>& until,
                          const OuterRates& outer = {0, 1}) {
  Machines<Model> machines(n, o);
  Numbers theta = machines.mean(), m(theta.size());
  std::int64_t made = 0, done = 0;
  auto exchange = [&] {
    const Numbers mean = machines.mean();
    for (std::size_t i = 0; i < m.size(); i++) {
      const double delta = theta[i] - mean[i];
      m[i] = outer.momentum * m[i] + delta;
      theta[i] -= outer.learning_rate * (delta + outer.momentum * m[i]);
    }
    machines.set(theta);
    made = 0;
  };
  for (int epoch = 0; done < o.steps; epoch++) {
    for (auto& m : machines.all) m.source->start(epoch);
    while (done < o.steps && machines.step(o.rate ? o.rate(double(done)) : 0)) {
      if (++made >= until(done++)) exchange();
    }
    if (made > 0) exchange();
  }
  return machines.mean();
}

Numbers cocod_by_hand(int n, const OwnLoop& o, std::int64_t steps) {
  Machines<Plain> machines(n, o);
  std::int64_t made = 0, done = 0;
  for (int epoch = 0; done < o.steps; epoch++) {
    for (auto& m : machines.all) m.source->start(epoch);
    std::vector<Numbers> sent(std::size_t(n), machines.mean());
    Numbers mean = machines.mean();  // of what was sent
    auto exchange = [&] {
      for (std::size_t r = 0; r < sent.size(); r++) {
        Numbers x = machines.all[r].x();
        for (std::size_t i = 0; i < x.size(); i++) x[i] = mean[i] + (x[i] - sent[r][i]);
        machines.all[r].x(x);
        sent[r] = x;
      }
      mean = machines.mean();
      made = 0;
    };
    while (done < o.steps && machines.step(o.rate ? o.rate(double(done)) : 0))
      if (done++; ++made == steps) exchange();
    exchange();
    machines.set(mean);
  }
  return machines.mean();
}

Numbers easgd_by_hand(int n, const OwnLoop& o, std::int64_t steps) {
  Machines<Plain> machines(n, o);
  Numbers z = machines.mean();
  std::int64_t made = 0, done = 0;
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
    made = 0;
  };
  for (int epoch = 0; done < o.steps; epoch++) {
    for (auto& m : machines.all) m.source->start(epoch);
    while (done < o.steps && machines.step(0))
      if (done++; ++made == steps) exchange();
    if (made > 0) exchange();
    if (!o.begins_epochs) machines.set(z);
  }
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
      {"adamw", [] { return std::make_unique<AdamW>(AdamWOptions{.learning_rate = 0.01}); }},
      {"lars", [] { return std::make_unique<LARS>(LARSOptions{}); }}};
  for (const auto& [name, optimizer] : optimizers)
    for (int n : {2, 3})
      for (std::int64_t steps : {1, 3, 8})
        for (auto [clip, tolerance] : {std::pair{0.0, 1e-12}, {0.5, 1e-6}}) {  // what is clipped away is found in f32
          const OwnLoop o{.global_batch = 42, .steps = 13, .clip = clip, .optimizer = optimizer};
          const auto want = local_sgd_by_hand(n, o, [=](std::int64_t) { return steps; });
          const auto got = trained(n, "local-sgd:" + std::to_string(steps), o, {.bucket_bytes = 4096});
          EXPECT_LE(furthest(got[0].weights, want), tolerance) << name << ", " << n << " ranks, " << steps << " steps";
        }
}

TEST(LocalSgd, WithAnOuterOptimizerToo) {
  for (int n : {1, 2, 3})
    for (const MakeOptimizer& optimizer : {MakeOptimizer(usual_sgd), MakeOptimizer([] {
                                             return std::make_unique<AdamW>(AdamWOptions{.learning_rate = 0.01});
                                           })}) {
      const OwnLoop o{.steps = 23, .optimizer = optimizer};  // five steps an epoch: two, two, and one at its end
      const auto want =
          local_sgd_by_hand(n, o, [](std::int64_t) { return 2; }, {.momentum = 0.8, .learning_rate = 0.6});
      EXPECT_LE(furthest(trained(n, "outer:H=2,momentum=0.8,lr=0.6", o)[0].weights, want), 1e-12) << n << " ranks";
      EXPECT_GT(furthest(trained(n, "local-sgd:2", o)[0].weights, want), 1e-4) << n << " ranks";
    }
}

TEST(LocalSgd, BatchNormLeavesWeightsAsByHandAndStatisticsMerged) {
  const OwnLoop o{.global_batch = 42, .steps = 12};
  const auto runs = trained<Odd>(3, "local-sgd:4", o);
  EXPECT_LE(furthest(runs[0].weights, local_sgd_by_hand<Odd>(3, o, [](std::int64_t) { return 4; })), 1e-12);
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
      const auto got = trained(n, "cocod-sgd:" + std::to_string(steps), o, {.bucket_bytes = 4096});
      EXPECT_LE(furthest(got[0].weights, cocod_by_hand(n, o, steps)), 1e-12) << n << " ranks, " << steps << " steps";
    }
}

TEST(LocalSgd, EasgdDrawsRanksAndTheirCentreTogether) {
  for (int n : {2, 3})
    for (std::int64_t steps : {1, 2, 3, 8})
      for (bool begins : {true, false}) {
        const OwnLoop o{.global_batch = 24, .steps = 25, .begins_epochs = begins};
        const auto got = trained(n, "easgd:" + std::to_string(steps), o, {.bucket_bytes = 4096});
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
  for (const Ended& run : on_ranks(2, "post-local-sgd:4", [](Strategy&s, Ended&run) { train<Plain>(s, run, {}); }))
    EXPECT_NE(run.said.find("call begin_epoch()"), std::string::npos) << run.said;
}

TEST(LocalSgd, AResumedRunKnowsWhetherTheRateHasDecayed) {
  for (auto [done, between] : {std::pair{0, 1}, {48, 2}}) {
    const OwnLoop o{.steps = 5, .rate = [](double step) { return step < 48 ? 0.1 : 0.01; }, .done = done, .of = 100};
    OwnLoop first = o;  // of which the machines by hand know nothing else
    first.rate = [&, done = done](double step) { return o.rate(step + double(done)); };
    EXPECT_LE(furthest(trained(2, "post-local-sgd:2", o)[0].weights,
                       local_sgd_by_hand(2, first, [between = between](std::int64_t) { return between; })),
              1e-12);
  }
}

TEST(LocalSgd, OneRankIsOneMachineBitForBit) {
  for (const char* strategy : {"local-sgd:3", "post-local-sgd:3", "cocod-sgd:3", "easgd:3"}) {
    Ended whole, own;
    Strategy one;
    const OwnLoop o{.steps = 12, .rate = [](double step) { return step < 6 ? 0.1 : 0.02; }, .of = 12};
    train<Odd>(one, whole, o);
    const auto runs = on_ranks(1, strategy, [&](Strategy& s, Ended& run) { train<Odd>(s, run, o); });
    EXPECT_EQ(runs[0].said, "");
    EXPECT_TRUE(runs[0].weights == whole.weights) << strategy;
    EXPECT_TRUE(runs[0].buffers == whole.buffers) << strategy;
  }
}

// The simulator deals batches out one by one; with batches that divide evenly its workers get what the ranks do.
TEST(LocalSgd, TheSimulatorComputesTheSame) {
  const Dataset data = synthetic({.side = 8, .channels = 1, .train = 240, .test = 10, .seed = 3});
  const SGDOptions given{.learning_rate = 0.05, .momentum = 0.9, .weight_decay = 5e-4};
  for (const char* strategy : {"local-sgd:5", "post-local-sgd:5", "cocod-sgd:5"}) {
    auto weights_of = [](Module& model) {
      Numbers all;
      for (auto& [name, p] : model.parameters())
        for (double v : p->variable.value().values()) all.push_back(v);
      return all;
    };
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
      auto own = reference_backend(1);
      Loader share(data.train, {.batch_per_rank = 8, .seed = 5, .prefetch = 0}, *own);
      Plain model;
      SGD sgd(given);
      FitOptions o = quiet(epochs);
      o.schedule = Schedule::parse("step:1:0.1");
      fit(model, cross_entropy_loss(), sgd, *own, {share, nullptr, nullptr}, o, &s);
      run.weights = weights_of(model);
    });
    same_bits(runs);
    EXPECT_LE(furthest(runs[0].weights, weights_of(simulated)), 2e-6) << strategy;
  }
}

// ---- the whole loop -------------------------------------------------------------------------------------------------
const char* const all_kinds[] = {"local-sgd:4", "post-local-sgd:4", "cocod-sgd:4", "easgd:4"};

TEST(LocalSgd, FitEndsWithTheSameOnEveryRank) {
  for (const char* strategy : all_kinds)
    for (double ema : {0.0, 0.9})
      for (int n : {2, 3})
        same_bits(on_ranks(n, strategy, [&](Strategy& s, Ended& run) {
          FitOptions o = quiet(3);
          o.ema = ema;
          fit_on(s, run, o);
        }));
}

TEST(LocalSgd, AStepIsOneRanksOwn) {
  on_ranks(4, "local-sgd:8", [](Strategy& s, Ended&) { EXPECT_EQ(s.ranks().per_step, 1); });
}

TEST(LocalSgd, OneRanksWishStopsAllAtTheSameExchange) {
  for (auto [strategy, exchanges] :
       {std::pair{"local-sgd:3", 1}, {"post-local-sgd:3", 1}, {"cocod-sgd:3", 2}, {"easgd:3", 2}}) {
    const auto runs = on_ranks(3, strategy, [](Strategy& s, Ended& run) {
      fit_on(s, run, quiet(50), [&](Batch&, std::int64_t made) {
        if (made == 21 && s.rank() == 1) s.request_stop();
      });
    });
    same_bits(runs);
    for (const Ended& run : runs) {
      EXPECT_GE(run.loss, 21) << strategy;
      EXPECT_LE(run.loss, 21 + 3 * exchanges) << strategy;
      EXPECT_EQ(run.loss, runs[0].loss) << strategy;
    }
  }
}

TEST(LocalSgd, ALossThatIsNotFiniteOnOneRankStopsAll) {
  for (const char* strategy :
       {"local-sgd:3", "local-sgd:100", "post-local-sgd:3", "cocod-sgd:3", "cocod-sgd:100", "easgd:3", "easgd:100"})
    for (int culprit : {0, 2}) {
      const auto runs = on_ranks(3, strategy, [&](Strategy& s, Ended& run) {
        fit_on(s, run, quiet(3), [&](Batch& batch, std::int64_t) {
          if (s.rank() == culprit && batch.epoch == 1 && batch.index == 2)
            batch.images.fill(std::numeric_limits<double>::infinity());
        });
      });
      for (int r = 0; r < 3; r++) {
        const std::string& said = runs[std::size_t(r)].said;
        if (r == culprit)
          EXPECT_NE(
              said.find("step 8 (epoch 2, batch 3): the loss or its gradient is not finite: the input pictures hold"),
              std::string::npos)
              << strategy << ": " << said;
        else
          EXPECT_NE(said.find("not finite: it was so on rank " + std::to_string(culprit)), std::string::npos)
              << strategy << ": " << said;
      }
    }
}

TEST(LocalSgd, FewerBytesTravel) {
  auto sent = [](const std::string& strategy) {
    std::map<std::string, double> measured;
    on_ranks(2, strategy, [&](Strategy& s, Ended& run) {
      train<Plain>(s, run, {.global_batch = 2, .steps = 96});
      if (s.rank() > 0) return;
      for (auto& [name, value] : s.end()) measured[name] = value;
    });
    EXPECT_GE(measured["hidden_share"], 0);
    EXPECT_GT(measured["exchange_seconds"], 0);
    return measured["sent_bytes"];
  };
  const double always = sent("all-reduce");
  for (const char* strategy : {"local-sgd:8", "cocod-sgd:8", "easgd:8"}) {
    const double ratio = always / sent(strategy);
    EXPECT_GT(ratio, 6.5) << strategy;  // with the first weights, an exchange at the end, and a comparison
    EXPECT_LT(ratio, 8.5) << strategy;
  }
}

TEST(LocalSgd, WhatDoesNotFitIsRefused) {
  for (const Ended& run : on_ranks(2, "local-sgd:4", [](Strategy&s, Ended&run) {
         FitOptions o = quiet(1);
         o.sync_batch_norm = true;
         fit_on(s, run, o);
       }))
    EXPECT_NE(run.said.find("--sync-bn with local-sgd:4"), std::string::npos) << run.said;
  for (const Ended& run : on_ranks(2, "local-sgd:4", [](Strategy&s, Ended&run) {
         if (s.rank() == 0)
           train<Plain>(s, run, {});
         else
           train<Odd>(s, run, {});
       }))
    EXPECT_NE(run.said.find("do not train the same model"), std::string::npos) << run.said;
}

TEST(LocalSgd, NamesAreRead) {
  for (const char* name : {"local-sgd:3", "post-local-sgd:12", "cocod-sgd:1", "easgd:8"})
    EXPECT_EQ(RoundSteps::parse(name)->name(), name);
  EXPECT_EQ(RoundSteps::parse("cocod-sgd")->name(), "cocod-sgd:8");
  EXPECT_FALSE(RoundSteps::parse("all-reduce"));
  EXPECT_FALSE(RoundSteps::parse("local-sgd8"));
  for (const char* wrong : {"local-sgd:0", "local-sgd:", "local-sgd:8x", "cocod-sgd:-1"})
    EXPECT_TRUE(refused([&] { RoundSteps::parse(wrong); }, {"STEPS, from 1"})) << wrong;
}

TEST(LocalSgd, ARankThatDiesStopsTheOthers) {
  for (const char* strategy : {"local-sgd:3", "cocod-sgd:3", "easgd:3"})
    for (std::int64_t at : {3, 20, 77}) {
      Outcome outcome;
      const auto runs = on_ranks(3, strategy, [](Strategy& s, Ended& run) { train<Odd>(s, run, {.steps = 30}); }, {},
                                 {.deadline = 30, .fault = {Fault::Kind::killed, at}, .outcome = &outcome});
      ASSERT_GE(outcome.faulty, 0);
      for (std::size_t r = 0; r < runs.size(); r++) {
        EXPECT_NE(runs[r].said, "") << "rank " << r;
        if (int(r) == outcome.faulty) continue;
        EXPECT_NE(runs[r].said.find("rank " + std::to_string(outcome.faulty) + ", which has left"), std::string::npos)
            << runs[r].said;
      }
    }
}

// What it writes is a run after a whole number of steps, also where the step was made before its exchange failed.
TEST(LocalSgd, WhatIsLeftOfARunGoesOnWhereItWas) {
  for (const char* strategy : {"local-sgd:3", "cocod-sgd:3", "easgd:3"})
    for (std::int64_t at = 300; at < 360; at += 15) {  // in exchanges, and in what follows an epoch
      TemporaryFolder folder;
      Outcome outcome;
      testing::internal::CaptureStderr();
      on_ranks(3, strategy,
               [&](Strategy& s, Ended& run) {
                 FitOptions o = quiet(1000);
                 o.checkpoint = folder.file("run");
                 fit_on(s, run, o);
               },
               {}, {.deadline = 30, .fault = {Fault::Kind::killed, at}, .outcome = &outcome});
      const std::string said = testing::internal::GetCapturedStderr();
      EXPECT_NE(said.find("rank " + std::to_string(outcome.faulty == 0 ? 1 : 0) + " has written"), std::string::npos)
          << said;
      const std::string file = folder.file("run/last.safetensors");
      auto backend = reference_backend(1);
      Odd model;
      FlatParameters flat(model, *backend, 1);
      SGD sgd({.learning_rate = 0.05, .momentum = 0.9});
      sgd.bind(flat);
      const RunPosition there = load_checkpoint(file, {flat, sgd});
      EXPECT_EQ(sgd.read_state().step, std::uint64_t(there.step)) << strategy << ", message " << at;
      EXPECT_EQ(there.epoch * there.batches + there.batch, there.step) << strategy << ", message " << at;
      EXPECT_GT(there.step, 3);
    }
}

}  // namespace
}  // namespace tandem::test
