// Recorded steps, on a twin of the reference backend that records as a GPU does. Training on it must give the bits of
// training without.
#include <nlohmann/json.hpp>

#include "core/clock.h"
#include "tests/training.h"
#include "tests/twin.h"

namespace tandem::test {
namespace {

// ---- a recording, without a device ----------------------------------------------------------------------------------
struct FakeCapture : Capture {
  std::string &log, refusal;
  static inline int alive = 0;
  FakeCapture(std::string& l, std::string why_not) : log(l), refusal(std::move(why_not)) { alive++; }
  ~FakeCapture() override { alive--; }
  void begin() override { log += '['; }
  std::string end() override {
    log += ']';
    return refusal;
  }
  void replay() override { log += 'r'; }
};

TEST(Recording, TwoEagerStepsThenReplaysOrEagerStepsAndTheReason) {
  const struct {
    const char* log;  // of five calls
    std::string why_eager;
    std::function<void()> while_recording;  // null: the device refuses, where there is a reason
  } cases[] = {{"ss[s]rrr", "", {}},
               {"ss[s]sss", "the device refuses", {}},
               {"ss[]sss", "a value is read on the host", [] { throw NotRecordable("a value is read on the host"); }},
               {"ss[]sss", "cuDNN refuses to be captured", [] { fail("cuDNN refuses to be captured"); }}};
  for (const auto& c : cases) {
    std::string log;
    int captures = -1;
    const auto step = [&] {
      if (log.ends_with('[') && c.while_recording) c.while_recording();
      log += 's';
      captures = FakeCapture::alive;
    };
    Recording recording(step, std::make_unique<FakeCapture>(log, c.while_recording ? "" : c.why_eager));
    const std::string said = stderr_of([&] {
      for (int i = 0; i < 5; i++) recording();
    });
    const bool recorded = c.why_eager.empty();
    EXPECT_EQ(log, c.log) << c.why_eager;
    EXPECT_EQ(recording.why_eager(), c.why_eager);
    EXPECT_EQ(recording.recorded(), recorded) << c.why_eager;
    EXPECT_TRUE(holds(said, {c.why_eager}));
    EXPECT_EQ(FakeCapture::alive, recorded) << c.why_eager;
    EXPECT_EQ(captures, recorded) << c.why_eager << ": the eager step finds its memory free";
  }
}

TEST(Recording, AnErrorWhileRecordingIsThrownWhenItComesAgain) {
  std::string log;
  int calls = 0;
  const auto step = [&] {
    if (++calls >= 3) fail("a real error");
  };
  Recording recording(step, std::make_unique<FakeCapture>(log, ""));
  recording(), recording();
  stderr_of([&] { EXPECT_REFUSED(recording(), "a real error"); });
  EXPECT_EQ(log, "[]") << "the stream does not stay in capture mode";
}

// ---- training on a twin that records --------------------------------------------------------------------------------
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

struct Profiled : InFolder {  // two of twelve steps are looked at
  std::string trace = folder.file("trace.json");
  std::function<void(RunConfig&)> change = [this](RunConfig& o) {
    o.profiler = {.dot = {}, .trace = trace, .warm_up = 5, .steps = 2};
  };
};

TEST_F(Profiled, StepsThatAreLookedAtRunOnTheHost) { EXPECT_EQ(same_bits({}, false, change).log, "ss[s]rrrrrrrr"); }

// A twin that passes each mark at once.
struct Followed : Twin {
  struct Marks : Clocked::Marks {
    using Clocked::Marks::Marks;
    std::int64_t time() const override { return std::chrono::nanoseconds(Clock::now().time_since_epoch()).count(); }
    std::vector<std::int64_t> times(const std::function<std::int64_t()>& now) override {
      EXPECT_EQ(open, 0) << "every range that began has ended";
      const std::int64_t later = now() - time();
      for (std::int64_t& m : marks) m += later;
      return std::exchange(marks, {});
    }
  };
  std::unique_ptr<Follower> follower() override { return std::make_unique<Marks>(memory()); }
};

TEST_F(Profiled, ATraceHasTheDevicesLanesOfTheStepsThatAreLookedAt) {
  Followed twin;
  train(twin, {}, change);
  std::map<double, std::string> lanes;
  std::map<std::string, int> steps, operations;
  double host = 0, device = 0;
  const auto written = nlohmann::json::parse(contents(trace));
  for (const auto& e : written.at("traceEvents")) {
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
