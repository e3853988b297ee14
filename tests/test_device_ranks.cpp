// Training with several ranks whose tensors are on devices: twins that run behind the host's back and record (twin.h),
// over in-process ranks. What they compute must be the bits of the same ranks in the host's memory.
#include "tests/host_ranks.h"
#include "tests/twin.h"

namespace tandem::test {
namespace {

struct Trained : Ended {
  std::vector<double> losses;
  std::int64_t steps = 0;
  std::string log;
  bool operator==(const Trained& o) const {
    return weights == o.weights && buffers == o.buffers && losses == o.losses && steps == o.steps;
  }
};

constexpr std::int64_t several_buckets = 1024;  // bytes of each

struct Recipe {
  std::int64_t pictures = 96;
  std::string optimizer = "sgd";
  double rate = 0.02, ema = 0;
  int accumulate = 1;
  AllReduceOptions exchange = {.bucket_bytes = several_buckets, .deadline = 30};
  std::string strategy = "all-reduce";
  int refuses = -1;  // the rank whose twin cannot record
  std::function<void(Strategy&, std::int64_t batch)> each = {};
  InProcessOptions wire = {.deadline = 30};
};

Trained train(Backend& backend, Strategy& strategy, const Recipe& r) {
  Trained out;
  Dataset data = synthetic({.side = 8, .channels = 1, .train = r.pictures, .test = 31, .seed = 3});
  std::int64_t made = 0;
  LoaderOptions o{.batch = 24, .seed = 2, .prefetch = 0};
  if (r.each) o.transform = [&](Batch&) { r.each(strategy, made++); };
  auto optimizer = make_optimizer({.learning_rate = r.rate, .optimizer = r.optimizer, .clip = 5});
  const RunConfig options{.epochs = 3, .progress = false, .accumulate = r.accumulate, .ema = r.ema};
  const FitReport report = fit_model<Odd>(strategy, out, data, o, *optimizer, options, backend, 0.1);
  for (const EpochReport& e : report.epochs) {
    out.losses.push_back(e.train_loss);
    out.losses.push_back(*e.test_accuracy);
  }
  out.steps = report.steps;
  return out;
}

// n ranks, on twins or in the host's memory.
std::vector<Trained> on_ranks(int n, const Recipe& r, bool devices) {
  NamedStrategies strategies(
      n, r.strategy,
      {.rounds = {.bucket_bytes = several_buckets, .deadline = 30}, .all_reduce = r.exchange, .wire = r.wire});
  std::vector<Trained> runs(static_cast<std::size_t>(n));
  testing::internal::CaptureStderr();
  const auto said = ranks_say(n, [&](int rank) {
    const auto i = std::size_t(rank);
    const std::unique_ptr<Backend> host = reference_backend(1);
    AsynchronousTwin twin;
    twin.refuses = rank == r.refuses;
    runs[i] = train(devices ? twin : *host, *strategies.of(rank), r);
    runs[i].log = twin.log;
  });
  const std::string all = testing::internal::GetCapturedStderr();
  for (std::size_t i = 0; i < runs.size(); i++) runs[i].said = said[i].empty() ? all : said[i];
  return runs;
}

std::vector<Trained> same_as_on_the_host(int n, const Recipe& r) {
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
      for (const Trained& e : same_as_on_the_host(n, {.optimizer = optimizer, .ema = 0.9}))
        // Two eager steps; then each half is recorded, and replayed ever after.
        EXPECT_EQ(e.log, "ssss[s]r[s]r" + std::string(18, 'r')) << n << " ranks";
}

// Also on a GPU, where there is one: with events in the graphs, and NCCL of one rank where there is libnccl.
TEST(DeviceRanks, OneRankIsOneMachine) {
  auto same = [](const std::function<std::unique_ptr<Backend>()>& make) {
    auto plain = make(), exchanging = make();
    plain->deterministic(true), exchanging->deterministic(true);
    Strategy one;
    const Trained want = train(*plain, one, {});
    auto ranks = all_reduce(alone(), {.bucket_bytes = several_buckets});
    stderr_of([&] { EXPECT_TRUE(train(*exchanging, *ranks, {}) == want) << exchanging->name(); });
  };
  same([] { return std::make_unique<AsynchronousTwin>(); });
  if (cuda_devices() > 0) same([] { return cuda_backend(0); });
}

TEST(DeviceRanks, WhoExchangesWeightsGivesTheBitsOfTheHost) {
  for (const std::string strategy :
       {"local-sgd:3", "post-local-sgd:3", "cocod-sgd:3", "easgd:3", "outer:H=3", "outer:H=4,stream=2",
        "daso:warm-up=1,cool-down=1,B=2", "daso:faithful,warm-up=1,cool-down=1,B=2", "daso:warm-up=0,cool-down=0,B=2",
        "daso:bf16=0,warm-up=2,cool-down=0"}) {
    SCOPED_TRACE(strategy);
    const int n = strategy.starts_with("daso") ? 4 : 3;
    for (const auto& [optimizer, pictures] : {std::pair{"sgd", 96}, {"adamw", 89}})
      for (const Trained& e :
           same_as_on_the_host(n, {.pictures = pictures, .optimizer = optimizer, .ema = 0.9, .strategy = strategy}))
        // The update is recorded with backward; the half behind the exchange has the average's.
        EXPECT_EQ(e.log, "ssss[s]r[s]r" + std::string(pictures == 96 ? 18 : 12, 'r'));
  }
}

TEST(DeviceRanks, SharesOfDifferentSizesRunEagerly) {
  // 24, 24, 24 and 17 pictures: of the last batch rank 0 has 5 or 6 of 17, and where it has as many as always, its
  // gradient weighs more.
  for (int n : {2, 3})
    for (std::int64_t pictures : {89, 95}) {
      for (const Trained& e : same_as_on_the_host(n, {.pictures = pictures}))
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
  for (const Trained& e : same_as_on_the_host(2, {.accumulate = 2})) {
    EXPECT_EQ(e.log, "");
    EXPECT_TRUE(holds(e.said, {"--accumulate"}));
  }
}

TEST(DeviceRanks, OneRanksWishStopsAllAtTheSameStep) {
  const auto stops = [](Strategy& s, std::int64_t batch) {
    if (batch == 7 && s.rank() == 1) s.request_stop();
  };
  const auto runs = on_ranks(3, {.each = stops}, true);
  for (const Trained& e : runs) {
    EXPECT_EQ(e.steps, runs[0].steps);
    EXPECT_LT(e.steps, 12);
    EXPECT_GT(e.steps, 5);
    EXPECT_TRUE(e.weights == runs[0].weights);
  }
}

TEST(DeviceRanks, ALossThatIsNotFiniteStopsEveryRank) {
  for (const char* strategy :
       {"all-reduce", "local-sgd:3", "cocod-sgd:3", "easgd:3", "outer:H=3", "outer:H=4,stream=2", "daso:warm-up=0,B=2"})
    for (const Trained& e : on_ranks(4, {.rate = 1e30, .strategy = strategy}, true))
      EXPECT_TRUE(holds(e.said, {"not finite"}));
}

TEST(DeviceRanks, GradientsInBf16AndParametersThatAreComparedOnTheWay) {
  Recipe narrow, compared;
  narrow.exchange.wire = DType::bf16;
  compared.exchange.check_every = 3;
  for (const Recipe& r : {narrow, compared}) same_as_on_the_host(2, r);
}

TEST(DeviceRanks, ARankThatDiesStopsTheOthers) {
  for (auto [strategy, at] : {std::pair{"all-reduce", 3},
                              {"all-reduce", 60},
                              {"all-reduce", 177},
                              {"local-sgd:3", 60},
                              {"cocod-sgd:3", 60},
                              {"easgd:3", 60},
                              {"outer:H=4,stream=2", 60}}) {
    Outcome outcome;
    const InProcessOptions wire{.deadline = 30, .fault = {Fault::Kind::killed, at}, .outcome = &outcome};
    const auto runs = on_ranks(3, {.strategy = strategy, .wire = wire}, true);
    ASSERT_GE(outcome.faulty, 0);
    for (const Trained& e : runs) EXPECT_TRUE(holds(e.said, {"rank " + std::to_string(outcome.faulty)}));
  }
}

TEST(DeviceRanks, ADeviceThatNeverEndsBackwardIsNamed) {
  auto ranks = in_process(2, {.deadline = 30});
  stderr_of([&] {
    const auto said = ranks_say(2, [&](int rank) {
      AsynchronousTwin twin;
      auto strategy = all_reduce(std::move(ranks[rank]), {.bucket_bytes = several_buckets, .deadline = 1});
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
