// Training with several ranks whose tensors are on devices: twins that run behind the host's back and record (twin.h),
// over in-process ranks. What they compute must be the bits of the same ranks in the host's memory.
#include "dist/strategies/all_reduce.h"
#include "dist/strategies/daso.h"
#include "dist/strategies/local_steps.h"
#include "tests/host_ranks.h"
#include "tests/ranks.h"
#include "tests/training.h"
#include "tests/twin.h"

namespace tandem::test {
namespace {

// With running statistics, a weight that is used twice and one that is not used at all.
struct Odd : Module {
  Conv2d& conv = adopt("conv", Conv2d::before_norm(1, 16, 3));
  BatchNorm2d& bn = child<BatchNorm2d>("bn", 16, true);
  Linear& wide = child<Linear>("wide", 16, 128);
  Linear& twice = child<Linear>("twice", 128, 128);
  Linear& idle = child<Linear>("idle", 16, 16);
  Linear& fc = child<Linear>("fc", 128, 10);
  Variable forward(const Variable& x) override { return fc(twice(twice(wide(global_average_pool(bn(conv(x))))))); }
};

struct Ended {
  std::vector<double> weights, buffers, losses;
  std::int64_t steps = 0;
  std::string log, said;
  bool operator==(const Ended& o) const {
    return weights == o.weights && buffers == o.buffers && losses == o.losses && steps == o.steps;
  }
};

struct Recipe {
  std::int64_t pictures = 96;
  std::string optimizer = "sgd";
  double rate = 0.02, ema = 0;
  int accumulate = 1;
  AllReduceOptions exchange = {.bucket_bytes = 16384, .deadline = 30};
  std::string local = {};  // "local-sgd:4": instead of all-reduce; of daso there are two hosts
  int refuses = -1;        // the rank whose twin cannot record
  std::function<void(Strategy&, std::int64_t batch)> each = {};
  InProcessOptions wire = {.deadline = 30};
};

Ended train(Backend& backend, Strategy& strategy, const Recipe& r) {
  Ended out;
  Dataset data = synthetic({.side = 8, .channels = 1, .train = r.pictures, .test = 31, .seed = 3});
  std::int64_t made = 0;
  LoaderOptions o{.batch = 24, .seed = 2, .prefetch = 0};
  if (r.each) o.transform = [&](Batch&) { r.each(strategy, made++); };
  Loader source(data.train, o, backend), test(data.test, {.batch = 31, .shuffle = false, .prefetch = 0}, backend);
  Odd model;
  auto optimizer = make_optimizer({.learning_rate = r.rate, .optimizer = r.optimizer, .clip = 5});
  RunConfig options{.epochs = 3, .progress = false, .accumulate = r.accumulate, .ema = r.ema};
  const FitReport report =
      fit(model, cross_entropy_loss(0.1), *optimizer, backend, {source, nullptr, &test}, options, &strategy);
  out.weights = parameter_values(model);
  out.buffers = buffer_values(model);
  for (const EpochReport& e : report.epochs) {
    out.losses.push_back(e.train_loss);
    out.losses.push_back(*e.test_accuracy);
  }
  out.steps = report.steps;
  return out;
}

// n ranks, on twins or in the host's memory.
std::vector<Ended> on_ranks(int n, const Recipe& r, bool devices) {
  auto ranks = in_process(n, r.wire);
  std::optional<HostRanks> hosts;
  if (DasoOptions::parse(r.local)) hosts.emplace(2, n / 2, r.wire);
  std::vector<Ended> runs(static_cast<std::size_t>(n));
  testing::internal::CaptureStderr();
  const auto said = ranks_say(n, [&](int rank) {
    const auto i = std::size_t(rank);
    std::unique_ptr<Backend> backend = reference_backend(1);
    Twin* twin = nullptr;
    if (devices) {
      auto owned = std::make_unique<Twin>();
      twin = owned.get();
      twin->behind = true;
      twin->refuses = rank == r.refuses;
      backend = std::move(owned);
    }
    const RoundsOptions options{.bucket_bytes = 16384, .deadline = 30};
    const auto daso_options = DasoOptions::parse(r.local);
    auto strategy = r.local.empty() ? all_reduce(std::move(ranks[i]), r.exchange)
                    : daso_options  ? rounds(hosts->of(rank), *daso_options, options)
                                    : rounds({std::move(ranks[i])}, *RoundSteps::parse(r.local), options);
    runs[i] = train(*backend, *strategy, r);
    if (twin) runs[i].log = twin->log;
  });
  const std::string all = testing::internal::GetCapturedStderr();
  for (std::size_t i = 0; i < runs.size(); i++) runs[i].said = said[i].empty() ? all : said[i];
  return runs;
}

std::vector<Ended> same_as_on_the_host(int n, const Recipe& r) {
  const auto host = on_ranks(n, r, false), twins = on_ranks(n, r, true);
  for (std::size_t i = 0; i < twins.size(); i++) {
    EXPECT_FALSE(host[i].weights.empty()) << host[i].said;
    EXPECT_TRUE(twins[i] == host[i]) << "rank " << i << " differs from the host's: " << twins[i].said;
    EXPECT_TRUE(twins[i].weights == twins[0].weights) << "rank " << i << " differs from rank 0";
  }
  return twins;
}

TEST(DeviceRanks, GiveTheBitsOfTheHost) {
  for (int n : {2, 3, 4})
    for (const char* optimizer : {"sgd", "lars"})
      for (const Ended& e : same_as_on_the_host(n, {.optimizer = optimizer, .ema = 0.9}))
        // Two eager steps; then each half is recorded, and replayed ever after.
        EXPECT_EQ(e.log, "ssss[s]r[s]r" + std::string(18, 'r')) << n << " ranks";
}

// Also on a GPU, where there is one: with events in the graphs, and NCCL of one rank where there is libnccl.
TEST(DeviceRanks, OneRankIsOneMachine) {
  auto same = [](const std::function<std::unique_ptr<Backend>()>& make) {
    auto plain = make(), exchanging = make();
    plain->deterministic(true), exchanging->deterministic(true);
    Strategy one;
    const Ended want = train(*plain, one, {});
    auto ranks = all_reduce(alone(), {.bucket_bytes = 16384});
    stderr_of([&] { EXPECT_TRUE(train(*exchanging, *ranks, {}) == want) << exchanging->name(); });
  };
  same([] { return std::make_unique<AsynchronousTwin>(); });
  if (cuda_devices() > 0) same([] { return cuda_backend(0); });
}

TEST(DeviceRanks, GradientsMayTravelInBf16) {
  Recipe r;
  r.exchange.wire = DType::bf16;
  same_as_on_the_host(2, r);
}

void rounds_are_as_on_the_host(int n, const std::string& local) {
  SCOPED_TRACE(local);
  for (const auto& [optimizer, pictures] : {std::pair{"sgd", 96}, {"adamw", 89}})
    for (const Ended& e :
         same_as_on_the_host(n, {.pictures = pictures, .optimizer = optimizer, .ema = 0.9, .local = local}))
      // The update is recorded with backward; the half behind the exchange has the average's.
      EXPECT_EQ(e.log, "ssss[s]r[s]r" + std::string(pictures == 96 ? 18 : 12, 'r'));
}

TEST(DeviceRanks, StepsOfTheirOwnGiveTheBitsOfTheHost) {
  for (const char* local :
       {"local-sgd:3", "post-local-sgd:3", "cocod-sgd:3", "easgd:3", "outer:H=3", "outer:H=4,stream=2"})
    rounds_are_as_on_the_host(3, local);
}

TEST(DeviceRanks, HostsThatExchangeWeightsGiveTheBitsOfTheHost) {
  for (const char* daso : {"daso:warm-up=1,cool-down=1,B=2", "daso:faithful,warm-up=1,cool-down=1,B=2",
                           "daso:warm-up=0,cool-down=0,B=2", "daso:bf16=0,warm-up=2,cool-down=0"})
    rounds_are_as_on_the_host(4, daso);
}

TEST(DeviceRanks, SharesOfDifferentSizesRunEagerly) {
  // 24, 24, 24 and 17 pictures: of the last batch rank 0 has 5 or 6 of 17, and where it has as many as always, its
  // gradient weighs more.
  for (int n : {2, 3})
    for (std::int64_t pictures : {89, 95}) {
      for (const Ended& e : same_as_on_the_host(n, {.pictures = pictures}))
        EXPECT_EQ(e.log, "ssss[s]r[s]r" + std::string(12, 'r'));
    }
}

TEST(DeviceRanks, AHalfThatCannotBeRecordedRunsEagerlyAndSaysWhy) {
  const auto runs = same_as_on_the_host(2, {.refuses = 1});
  EXPECT_EQ(runs[0].log, "ssss[s]r[s]r" + std::string(18, 'r'));
  EXPECT_EQ(runs[1].log, "ssss[s]s[s]s" + std::string(18, 's'));
  EXPECT_TRUE(holds(runs[1].said, {"the twin refuses"}));
}

// Lets gradients through, but for the first one.
struct Stumbles : Node {
  static constexpr auto name = "stumbles";
  bool& stumbled;
  explicit Stumbles(bool& s) : Node(name), stumbled(s) {}
  void backward(Tensor dy, std::span<GradientSlot> slots) override {
    if (!std::exchange(stumbled, true)) throw Error("stumbled");
    slots[0].accumulate(dy);
  }
};

TEST(DeviceRanks, ABackwardThatBreaksOffMayBeRepeated) {
  auto run = [](bool breaks) {
    auto ranks = in_process(2, {.deadline = 30});
    std::vector<std::vector<double>> weights(2);
    stderr_of([&] {
      all_well(ranks_say(2, [&](int rank) {
        AsynchronousTwin twin;
        auto strategy = all_reduce(std::move(ranks[rank]), {.bucket_bytes = 1 << 20, .deadline = 30});
        struct Model : Module {
          Linear& a = child<Linear>("a", 16, 100);
          Linear& b = child<Linear>("b", 100, 10);
          bool stumbled = true;
          Variable forward(const Variable& x) override {
            const Variable h = a(x);
            return b(record<Stumbles>(h.value(), {&h}, {}, stumbled));
          }
        } model;
        FlatParameters flat(model, twin, 1);
        BoundSgd sgd(flat, {.learning_rate = 0.1});
        strategy->begin(flat, sgd);
        for (int step = 0; step < 3; step++) {
          const Tensor x = Tensor::of(twin, {4, 16}, numbers("x" + std::to_string(rank + 2 * step), 64));
          const Tensor y = Tensor::of(twin, {4}, {0, 1, 2, 3}, DType::i32);
          model.stumbled = !(breaks && step == 1);
          for (bool over = false; !over;) {
            const Variable loss = cross_entropy(model(Variable(x)), y);
            flat.zero_gradients();
            try {
              flat.backward(loss, 0.5);
              sgd.sync_hyperparameters();
              strategy->step(sgd, loss);
              over = true;
            } catch (const Error& e) {
              if (e.what() != std::string("stumbled")) throw;
            }
          }
        }
        strategy->end();
        weights[rank] = flat.values.values();
      }));
    });
    EXPECT_TRUE(weights[0] == weights[1]);
    return weights[0];
  };
  EXPECT_TRUE(run(true) == run(false));
}

TEST(DeviceRanks, AccumulatedBatchesAreNotRecorded) {
  for (const Ended& e : same_as_on_the_host(2, {.accumulate = 2})) {
    EXPECT_EQ(e.log, "");
    EXPECT_TRUE(holds(e.said, {"--accumulate"}));
  }
}

TEST(DeviceRanks, OneRanksWishStopsAllAtTheSameStep) {
  const auto stops = [](Strategy& s, std::int64_t batch) {
    if (batch == 7 && s.rank() == 1) s.request_stop();
  };
  const auto runs = on_ranks(3, {.each = stops}, true);
  for (const Ended& e : runs) {
    EXPECT_EQ(e.steps, runs[0].steps);
    EXPECT_LT(e.steps, 12);
    EXPECT_GT(e.steps, 5);
    EXPECT_TRUE(e.weights == runs[0].weights);
  }
}

TEST(DeviceRanks, ALossThatIsNotFiniteStopsEveryRank) {
  for (const char* local :
       {"", "local-sgd:3", "cocod-sgd:3", "easgd:3", "outer:H=3", "outer:H=4,stream=2", "daso:warm-up=0,B=2"}) {
    for (const Ended& e : on_ranks(4, {.rate = 1e30, .local = local}, true)) EXPECT_TRUE(holds(e.said, {"not finite"}));
  }
}

TEST(DeviceRanks, ParametersAreComparedOnTheWay) {
  Recipe r;
  r.exchange.check_every = 3;
  same_as_on_the_host(2, r);
}

TEST(DeviceRanks, ARankThatDiesStopsTheOthers) {
  for (auto [local, at] : std::vector<std::pair<std::string, std::int64_t>>{{"", 3},
                                                                            {"", 60},
                                                                            {"", 177},
                                                                            {"local-sgd:3", 60},
                                                                            {"cocod-sgd:3", 60},
                                                                            {"easgd:3", 60},
                                                                            {"outer:H=4,stream=2", 60}}) {
    Outcome outcome;
    const InProcessOptions wire{.deadline = 30, .fault = {Fault::Kind::killed, at}, .outcome = &outcome};
    const auto runs = on_ranks(3, {.local = local, .wire = wire}, true);
    ASSERT_GE(outcome.faulty, 0);
    for (const Ended& e : runs) EXPECT_TRUE(holds(e.said, {"rank " + std::to_string(outcome.faulty)}));
  }
}

TEST(DeviceRanks, ADeviceThatNeverEndsBackwardIsNamed) {
  auto ranks = in_process(2, {.deadline = 30});
  stderr_of([&] {
    const auto said = ranks_say(2, [&](int rank) {
      AsynchronousTwin twin;
      auto strategy = all_reduce(std::move(ranks[rank]), {.bucket_bytes = 16384, .deadline = 1});
      train(twin, *strategy,
            {.each = [&](Strategy& s, std::int64_t batch) { twin.stuck = s.rank() == 1 && batch == 5; }});
    });
    all_say(said, {"rank 1: its device has not come to the end of backward for 1 s"});
  });
}

TEST(DeviceRanks, EachRankOfAHostTakesAGpuOfItsOwn) {
  EXPECT_EQ(device_of_rank(0, 4), 0);
  EXPECT_EQ(device_of_rank(3, 4), 3);
  EXPECT_EQ(device_of_rank(5, 4), 1);  // shared
  EXPECT_EQ(device_of_rank(1, 0), 0);  // there is none: cuda_backend() says why
}

TEST(DeviceRanks, RanksShareTheCoresOfAHost) {
  EXPECT_EQ(threads_of_rank(2, 8, 8), 4);
  EXPECT_EQ(threads_of_rank(2, 8, 1), 1);  // bound to a core by its launcher
  EXPECT_EQ(threads_of_rank(3, 2, 2), 1);
}

}  // namespace
}  // namespace tandem::test
