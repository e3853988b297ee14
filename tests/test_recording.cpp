// Recorded steps, on a twin of the reference backend that records as a GPU does. Training on it must give the bits of
// training without.
#include <nlohmann/json.hpp>

#include "layers/train/step_graph.h"
#include "tests/training.h"
#include "tests/twin.h"

namespace tandem::test {
namespace {

struct Trained {
  std::string log, said;
  std::vector<double> weights, buffers;
  std::vector<EpochReport> epochs;
};

struct Recipe {
  std::int64_t pictures = 64, batch = 16;
  std::string optimizer = "sgd";
  double ema = 0, mixup = 0;
  int accumulate = 1;
  bool moves = false;  // every batch comes in memory of its own
};

Trained train(Backend& backend, const Recipe& r, std::function<void(RunConfig&)> change = {}) {
  Trained out;
  Dataset data = synthetic({.side = 28, .train = r.pictures, .test = 20});
  std::vector<Tensor> all;  // kept, or the allocator gives the same memory again
  LoaderOptions o{
      .batch = r.batch, .augment = {.pad_crop = 2, .flip = true}, .mixup = r.mixup, .seed = 3, .prefetch = 0};
  o.transform = [&](Batch& b) {
    if (r.moves) all.push_back(b.images = b.images.clone());
  };
  Loader loader(data.train, o, backend);
  Loader held(data.test, {.batch = 20, .shuffle = false, .prefetch = 0}, backend);
  auto model = make_model("lenet5", 10, 1, 28);
  auto optimizer = make_optimizer({.learning_rate = 0.01, .optimizer = r.optimizer, .clip = 5});
  RunConfig options{.epochs = 3, .schedule = "cosine", .progress = false, .accumulate = r.accumulate, .ema = r.ema};
  if (change) change(options);
  Strategy one;
  out.said = stderr_of([&] {
    const FitData batches{loader, nullptr, &held};
    out.epochs = fit(*model, cross_entropy_loss(0.1), *optimizer, backend, batches, options, &one).epochs;
  });
  out.weights = parameter_values(*model);
  out.buffers = buffer_values(*model);
  return out;
}

// Trains with and without recording, and returns what the twin did.
Trained same_bits(const Recipe& r, bool refuses = false, std::function<void(RunConfig&)> change = {}) {
  auto plain_backend = reference_backend(1);
  Twin twin;
  twin.refuses = refuses;
  const Trained plain = train(*plain_backend, r, change);
  Trained recorded = train(twin, r, change);
  EXPECT_EQ(plain.weights, recorded.weights);
  EXPECT_EQ(plain.buffers, recorded.buffers);
  EXPECT_EQ(plain.epochs.size(), recorded.epochs.size());
  for (std::size_t i = 0; i < std::min(plain.epochs.size(), recorded.epochs.size()); i++) {
    EXPECT_EQ(plain.epochs[i].train_loss, recorded.epochs[i].train_loss);
    EXPECT_EQ(plain.epochs[i].train_accuracy, recorded.epochs[i].train_accuracy);
    EXPECT_EQ(plain.epochs[i].test_loss, recorded.epochs[i].test_loss);
  }
  recorded.log = twin.log;
  return recorded;
}

TEST(RecordedStep, GivesTheBitsOfTheStepItself) {
  for (const char* optimizer : {"sgd", "adamw", "lars"})
    EXPECT_EQ(same_bits({.optimizer = optimizer, .ema = 0.9}).log, "ss[s]rrrrrrrrrr") << optimizer;
}

TEST(RecordedStep, TheSmallerLastBatchOfAnEpochRunsEagerly) {
  // 4 batches of 16 and one of 6: the recording goes on behind it.
  EXPECT_EQ(same_bits({.pictures = 70}).log, "ss[s]rrrrrrrrrr");
}

TEST(RecordedStep, WhatCannotBeRecordedSaysWhyAndTrainsTheSame) {
  const Trained mixed = same_bits({.mixup = 0.4});
  EXPECT_EQ(mixed.log, "");
  EXPECT_TRUE(holds(mixed.said, {"mixup"}));
  const Trained summed = same_bits({.accumulate = 2});
  EXPECT_EQ(summed.log, "");
  EXPECT_TRUE(holds(summed.said, {"--accumulate"}));
  const Trained refused = same_bits({}, true);
  EXPECT_EQ(refused.log, "ss[s]ssssssssss") << "the gradients of the recording do not count";
  EXPECT_TRUE(holds(refused.said, {"the twin refuses"}));
}

TEST(RecordedStep, WithinABudgetOfMemoryItIsRecordedWhenThePlanStands) {
  for (const bool behind : {false, true}) {
    auto plain_backend = reference_backend(1);
    Clocked twin;
    twin.behind = behind;
    const auto change = [](RunConfig& o) { o.epochs = 6, o.memory_budget = std::size_t{1} << 30; };
    EXPECT_EQ(train(*plain_backend, {}, change).weights, train(twin, {}, change).weights);
    EXPECT_EQ(twin.log.substr(0, 6), "ss[s]r");
    EXPECT_LT(twin.log.size(), 24u) << "the first steps are not counted: their plan changes";
  }
}

TEST(RecordedStep, ABatchInOtherMemoryEachTimeIsNotRecorded) {
  const Trained moved = same_bits({.moves = true});
  EXPECT_EQ(moved.log.find('r'), std::string::npos) << moved.log;
  EXPECT_TRUE(holds(moved.said, {"other memory"}));
}

TEST(RecordedStep, StepsThatAreLookedAtRunOnTheHost) {
  TemporaryFolder folder;
  const Trained looked = same_bits({}, false, [&](RunConfig& o) {
    o.profiler = {.dot = {}, .trace = folder.file("trace.json"), .warm_up = 5, .steps = 2};
  });
  EXPECT_EQ(looked.log, "ss[s]rrrrrrrr") << "twelve steps, two of them looked at";
}

// A twin that a trace may follow, and that passes each mark at once.
struct Followed : Twin {
  struct Marks : Follower {
    std::vector<std::chrono::steady_clock::time_point> marks;
    int open = 0;
    void enter(const char*) override { open++; }
    void leave() override { open--; }
    void passed(const char*) override {}
    std::int64_t mark() override {
      marks.push_back(std::chrono::steady_clock::now());
      return std::int64_t(marks.size()) - 1;
    }
    std::vector<std::int64_t> times(const std::function<std::int64_t()>& now) override {
      const std::int64_t here = now();
      const auto at = std::chrono::steady_clock::now();
      std::vector<std::int64_t> all;
      for (auto& m : marks) all.push_back(here - std::chrono::nanoseconds(at - m).count());
      marks.clear();
      EXPECT_EQ(open, 0) << "every range that began has ended";
      return all;
    }
  };
  std::unique_ptr<Follower> follower() override { return std::make_unique<Marks>(); }
};

TEST(RecordedStep, ATraceHasTheDevicesLanesOfTheStepsThatAreLookedAt) {
  TemporaryFolder folder;
  Followed twin;
  train(twin, {},
        [&](RunConfig& o) { o.profiler = {.dot = {}, .trace = folder.file("trace.json"), .warm_up = 5, .steps = 2}; });
  const auto trace = nlohmann::json::parse(contents(folder.file("trace.json")));
  std::map<double, std::string> lanes;
  std::map<std::string, int> steps, operations;
  double host = 0, device = 0;
  for (const auto& e : trace.at("traceEvents")) {
    const double lane = e.value("tid", 0.0);
    const std::string name = e.at("name");
    if (name == "thread_name") lanes[lane] = e.at("args").at("name").get<std::string>();
    if (e.at("ph") != "X") continue;
    steps[lanes[lane]] += name == "step";
    operations[lanes[lane]] += e.at("cat") == "op";
    if (name == "step") (lanes[lane] == "step" ? host : device) += e.at("ts").get<double>();
  }
  EXPECT_EQ(steps["step"], 2);
  EXPECT_EQ(steps["device: step"], 2);
  EXPECT_GT(operations["forward"], 5);
  EXPECT_EQ(operations["device: forward"], operations["forward"]);
  EXPECT_EQ(operations["device: backward"], operations["backward"]);
  EXPECT_NEAR(device, host, 2 * 20'000.0) << "both are on one clock";
}

TEST(RecordedStep, WhatCannotBeRecordedKeepsNoCapture) {
  struct Counting : Capture {
    int& alive;
    bool refuses;
    Counting(int& a, bool r) : alive(a), refuses(r) { alive++; }
    ~Counting() override { alive--; }
    void begin() override {}
    std::string end() override { return refuses ? "refused" : ""; }
    void replay() override {}
  };
  for (const char* how : {"recorded", "refused", "thrown"}) {
    const bool recorded = how == std::string("recorded"), throws = how == std::string("thrown");
    int alive = 0, steps = 0, at_last = -1;
    const auto step = [&] {
      if (++steps == 3 && throws) throw NotRecordable("a value is read on the host");
      at_last = alive;
    };
    Recording recording(step, std::make_unique<Counting>(alive, !recorded));
    stderr_of([&] {
      for (int i = 0; i < 4; i++) recording();
    });
    EXPECT_EQ(alive, recorded) << how;
    EXPECT_EQ(at_last, recorded) << how << ": the eager step finds its memory free";
    EXPECT_EQ(steps, recorded ? 3 : 5) << how;
  }
}

TEST(RecordedStep, AValueReadInTheModelIsRefusedAndTheReasonSaid) {
  Twin twin;
  struct Reads : Module {
    Linear& inner = child<Linear>("inner", 28 * 28, 10);
    Variable forward(const Variable& x) override {
      Variable y = inner(flatten(x));
      y.value().values();
      return y;
    }
  } model;
  Dataset data = synthetic({.side = 28, .train = 64, .test = 20});
  Loader loader(data.train, {.batch = 16, .prefetch = 0}, twin);
  SGD sgd({.learning_rate = 0.01});
  Strategy one;
  EXPECT_TRUE(holds(
      stderr_of([&] { fit(model, cross_entropy_loss(), sgd, twin, {loader}, {.epochs = 2, .progress = false}, &one); }),
      {"read on the host"}));
  EXPECT_EQ(twin.log, "ss[s]ssssss");
}

}  // namespace
}  // namespace tandem::test
