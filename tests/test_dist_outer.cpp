// The outer optimizer and rare exchanges by the learning rate, on in-process ranks.
#include <gtest/gtest.h>

#include "dist/strategies/rounds.h"
#include "layers/train/checkpoint.h"
#include "tests/replicas.h"

namespace tandem::test {
namespace {

using Numbers = std::vector<double>;

MakeStrategy named(const std::string& name, std::int64_t bucket_bytes = 4096) {
  return [=](std::unique_ptr<Communicator> ranks) -> std::unique_ptr<Strategy> {
    return rounds(std::move(ranks), *RoundSteps::parse(name), {.bucket_bytes = bucket_bytes});
  };
}

template <class Model = Plain>
std::vector<Ended> trained(int n, const std::string& strategy, const OwnLoop& o) {
  auto runs = on_ranks(n, named(strategy), [&](Strategy& s, Ended& run) { train<Model>(s, run, o); });
  same_bits(runs);
  return runs;
}

MakeOptimizer adamw() {
  return [] { return std::make_unique<AdamW>(AdamWOptions{.learning_rate = 0.01}); };
}

// ---- what is computed -----------------------------------------------------------------------------------------------
TEST(Outer, WithoutMomentumItIsLocalSgdToTheBit) {
  for (int n : {2, 3})
    for (std::int64_t steps : {1, 3, 8})
      for (const MakeOptimizer& optimizer : {MakeOptimizer(usual_sgd), adamw()}) {
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

// One rank: the sequence of what four steps change, put through SGD with Nesterov's momentum. Each round is run by
// itself, from θ.
TEST(Outer, OneRankIsNesterovOnWhatRoundsChange) {
  auto backend = reference_backend(1);
  const Dataset data = odd_number_of_pictures();
  Loader source(data.train, {.batch = 11, .seed = 5, .prefetch = 0}, *backend);  // 19 batches an epoch
  Plain model;
  FlatParameters flat(model, *backend, 100, {}, DType::f64);
  SGD inner({.learning_rate = 0.1});
  inner.bind(flat);
  Plain outer_model;
  FlatParameters theta(outer_model, *backend, 100, {}, DType::f64);
  SGD nesterov({.learning_rate = 0.5, .momentum = 0.75, .nesterov = true});  // exact in f32
  nesterov.bind(theta);
  theta.values.copy_from(flat.values);
  int made = 0;
  auto round_ends = [&] {
    Numbers delta = theta.values.values();
    const Numbers x = flat.values.values();
    for (std::size_t i = 0; i < x.size(); i++) delta[i] -= x[i];
    theta.zero_gradients();
    theta.gradients.copy_from(Tensor::of(*backend, theta.values.shape(), delta, DType::f64));
    nesterov.update(nullptr);
    flat.values.copy_from(theta.values);
    flat.count_writes(flat.all());
    made = 0;
  };
  for (int epoch = 0, done = 0; done < 41; epoch++) {
    source.start(epoch);
    for (Batch batch; done < 41 && source.next(batch); done++) {
      flat.zero_gradients();
      Variable x(batch.images.cast(DType::f64));
      Variable loss = cross_entropy(model(x), batch.labels);
      flat.backward(loss);
      inner.step(&loss.value());
      if (++made == 4) round_ends();
    }
    if (made > 0) round_ends();
  }
  const OwnLoop o{.global_batch = 11, .steps = 41, .optimizer = [] {
                    return std::make_unique<SGD>(SGDOptions{.learning_rate = 0.1});
                  }};
  EXPECT_LE(furthest(trained(1, "outer:H=4,momentum=0.75,lr=0.5", o)[0].weights, flat.values.values()), 1e-9);
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
  const int n = 2, fragments = 2, steps = 6, every = 3;
  for (int overlap : {1, 2, 3}) {
    const OwnLoop o{.global_batch = 24, .steps = 17};  // nine batches an epoch
    std::vector<std::unique_ptr<Plain>> models;
    std::vector<std::unique_ptr<FlatParameters>> flat;
    std::vector<std::unique_ptr<Optimizer>> optimizers;
    std::vector<std::unique_ptr<Loader>> sources;
    auto backend = reference_backend(1);
    const Dataset data = odd_number_of_pictures();
    for (int r = 0; r < n; r++) {
      sources.push_back(std::make_unique<Loader>(
          data.train, LoaderOptions{.batch = 24, .seed = 5, .rank = r, .world = n, .prefetch = 0}, *backend));
      models.push_back(std::make_unique<Plain>());
      flat.push_back(std::make_unique<FlatParameters>(*models.back(), *backend, 100, FlatMemory{}, DType::f64));
      optimizers.push_back(usual_sgd());
      optimizers.back()->bind(*flat.back());
    }
    Numbers theta = flat[0]->values.values(), m(theta.size());
    std::vector<Numbers> sent;
    const auto half = std::int64_t(theta.size()) / fragments / FlatParameters::cut * FlatParameters::cut;
    const Range ranges[] = {{0, half}, {half, std::int64_t(theta.size())}, {0, std::int64_t(theta.size())}};
    Range range{};
    int left = 0, made = 0;
    auto send = [&](int which) {
      range = ranges[which], left = overlap;
      sent.clear();
      for (auto& f : flat) sent.push_back(f->values.values());
    };
    auto merge = [&] {
      left = 0;
      std::vector<Numbers> x;
      for (auto& f : flat) x.push_back(f->values.values());
      for (auto i = std::size_t(range.begin); i < std::size_t(range.end); i++) {
        const double delta = theta[i] - (sent[0][i] + sent[1][i]) / 2;
        m[i] = beta * m[i] + delta;
        theta[i] -= gamma * (delta + beta * m[i]);
        for (std::size_t r = 0; r < x.size(); r++) x[r][i] = theta[i] + (x[r][i] - sent[r][i]);
      }
      for (std::size_t r = 0; r < x.size(); r++) {
        flat[r]->values.copy_from(Tensor::of(*backend, flat[r]->values.shape(), x[r], DType::f64));
        flat[r]->count_writes(flat[r]->all());
      }
    };
    for (int epoch = 0, done = 0; done < o.steps; epoch++) {
      for (auto& s : sources) s->start(epoch);
      for (bool more = true; done < o.steps;) {
        for (std::size_t r = 0; r < flat.size(); r++) {
          Batch batch;
          if (!(more = sources[r]->next(batch))) break;
          flat[r]->zero_gradients();
          Variable loss = cross_entropy((*models[r])(Variable(batch.images.cast(DType::f64))), batch.labels);
          flat[r]->backward(loss, n * double(batch.size()) / double(batch.over_ranks()));
          optimizers[r]->step(&loss.value());
        }
        if (!more) break;
        made++, done++;
        if (left > 0 && --left == 0) merge();
        if (made % every == 0) send(made % steps == 0 ? 1 : 0);
      }
      if (left > 0) merge();
      send(2), merge();
      made = 0;
    }
    const std::string name = "outer:H=6,stream=2,momentum=0.5,lr=0.75,overlap=" + std::to_string(overlap);
    const auto got = trained(n, name, o);
    EXPECT_LE(furthest(got[0].weights, theta), 1e-12) << name;
    if (overlap < every) continue;  // which is what is done where `overlap` is not given
    EXPECT_TRUE(got[0].weights == trained(n, "outer:H=6,stream=2,momentum=0.5,lr=0.75", o)[0].weights);
  }
}

// ---- the whole loop -------------------------------------------------------------------------------------------------
TEST(Outer, FitEndsWithTheSameOnEveryRank) {
  for (const char* strategy : {"outer:H=3", "outer:H=4,stream=2", "outer:H=qsr:0.2:3", "local-sgd:qsr:0.2:3"})
    for (double ema : {0.0, 0.9})
      same_bits(on_ranks(3, named(strategy), [&](Strategy& s, Ended& run) {
        FitOptions o = quiet(3);
        o.ema = ema;
        fit_on(s, run, o);
      }));
}

// The outer momentum is in the checkpoint. The inner optimizer has none, since only rank 0's would be.
TEST(Outer, ARunGoesOnBitForBit) {
  auto run_on = [](int epochs, const std::string& checkpoint, const std::string& resume, const std::string& strategy) {
    auto runs = on_ranks(2, named(strategy), [&](Strategy& s, Ended& run) {
      auto backend = reference_backend(1);
      Dataset data = odd_number_of_pictures();
      Loader train(data.train, {.batch = 24, .seed = 2, .prefetch = 0}, *backend);
      Plain model;
      SGD sgd({.learning_rate = 0.05});
      FitOptions o = quiet(epochs);
      o.checkpoint = checkpoint, o.resume = resume;
      fit(model, cross_entropy_loss(), sgd, *backend, {train, nullptr, nullptr}, o, &s);
      for (auto& [name, p] : model.parameters())
        for (double v : p->variable.value().values()) run.weights.push_back(v);
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

TEST(Outer, OneRanksWishStopsAllAtTheSameExchange) {
  for (auto [strategy, within] : {std::pair{"outer:H=3", 3}, {"outer:H=6,stream=2", 6}}) {
    const auto runs = on_ranks(3, named(strategy), [](Strategy& s, Ended& run) {
      fit_on(s, run, quiet(50), [&](Batch&, std::int64_t made) {
        if (made == 21 && s.rank() == 1) s.request_stop();
      });
    });
    same_bits(runs);
    EXPECT_GE(runs[0].loss, 21) << strategy;
    EXPECT_LE(runs[0].loss, 21 + within) << strategy;
  }
}

TEST(Outer, ARankThatDiesStopsTheOthers) {
  for (const char* strategy : {"outer:H=3", "outer:H=6,stream=2"})
    for (std::int64_t at : {3, 20, 77}) {
      Outcome outcome;
      const auto runs = on_ranks(3, named(strategy), [](Strategy& s, Ended& run) { train<Odd>(s, run, {.steps = 30}); },
                                 {.deadline = 30, .fault = {Fault::Kind::killed, at}, .outcome = &outcome});
      ASSERT_GE(outcome.faulty, 0);
      for (std::size_t r = 0; r < runs.size(); r++) {
        if (int(r) == outcome.faulty) continue;
        EXPECT_NE(runs[r].said.find("rank " + std::to_string(outcome.faulty) + ", which has left"), std::string::npos)
            << runs[r].said;
      }
    }
}

// ---- names and intervals --------------------------------------------------------------------------------------------
TEST(Outer, NamesAreRead) {
  for (const char* name : {"outer:H=100,momentum=0.9,lr=0.7", "outer:H=30,momentum=0,lr=1,stream=3",
                           "outer:H=30,momentum=0,lr=1,stream=3,overlap=4", "outer:H=qsr:0.2:50,momentum=0.9,lr=0.7"})
    EXPECT_EQ(RoundSteps::parse(name)->name(), name);
  EXPECT_EQ(RoundSteps::parse("outer")->name(), "outer:H=100,momentum=0.5,lr=0.7");
  EXPECT_FALSE(RoundSteps::parse("outers"));
  for (auto [wrong, says] : {std::pair{"outer:H=0", "H is STEPS, from 1"},
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
  auto sent = [&](const std::string& strategy) {
    const auto runs = on_ranks(2, named(strategy), [&](Strategy& s, Ended& run) {
      train<Plain>(s, run, o);
      for (auto& [name, value] : s.end())
        if (name == "sent_bytes") run.loss = value;
    });
    same_bits(runs);
    return runs[0].loss;
  };
  const double fixed = sent("local-sgd:26"), one = sent("local-sgd:13") - fixed;  // one: an exchange
  for (const char* strategy :
       {"local-sgd:qsr:0.2001:2", "outer:H=qsr:0.2001:2"})  // after 4, 8 and 24 steps, and at the end of the epoch
    EXPECT_NEAR((sent(strategy) - fixed) / one, 3, 0.05) << strategy;
}

}  // namespace
}  // namespace tandem::test
