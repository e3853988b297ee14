// Seeing what a run does: traces, profiles, pictures of the tape, summaries, who holds the memory.
#include <nlohmann/json.hpp>

#include "autograd/tape.h"
#include "core/files/files.h"
#include "core/files/json.h"
#include "core/trace/trace.h"
#include "layers/export/summary.h"
#include "tests/training.h"

namespace tandem::test {
namespace {

// ---- JSON -----------------------------------------------------------------------------------------------------------
TEST(SeeingJson, ReadsOneDocumentAndNamesWhatIsWrong) {
  EXPECT_EQ(parse_json(R"({"b":[1,"y\u00e9"], "a":{}})").dump(), R"({"b":[1,"yé"],"a":{}})") << "in order";
  for (const char* bad : {"{", "[1,]", "01", "nul", "\"\x01\"", "\"\xff\"", "1 2", "{\"a\":}", "'a'", "1e999"})
    EXPECT_THROW(parse_json(bad), JsonError) << bad;
  EXPECT_REFUSED(parse_json(R"({"a" 1})"), "at line 1, column 6", "expected ':'");
  EXPECT_REFUSED(parse_json(R"({"a":1,"a":2})"), "\"a\" comes twice");
  EXPECT_REFUSED(parse_json(std::string(1'000'000, '[')), "nested deeper");
  EXPECT_REFUSED(parse_json(""), "at line 1, column 1", "input");
  EXPECT_EQ(plain_text("é\n\xff\x80 \xf0\x9f\x98\x80\xc3"), "é%0A%FF%80 \xf0\x9f\x98\x80%C3");
  EXPECT_EQ(json_quoted("a\"\\\n\x01\xff é"), "\"a\\\"\\\\\\n\\u0001\xEF\xBF\xBD é\"");
  EXPECT_EQ(json_number(NAN), "null");
}

// ---- traces ---------------------------------------------------------------------------------------------------------
// Every event lies inside or beside every other of its lane.
void expect_nested(const nlohmann::json& events) {
  std::map<int, std::vector<std::pair<double, double>>> open;
  for (const auto& e : events) {
    if (e["ph"] != "X") continue;
    double begin = e["ts"], end = begin + e["dur"].get<double>();
    auto& stack = open[e["tid"]];
    while (!stack.empty() && stack.back().second <= begin + 0.002) stack.pop_back();
    EXPECT_TRUE(stack.empty() || end <= stack.back().second + 0.002) << e;
    stack.push_back({begin, end});
  }
}

TEST(SeeingTrace, OffRecordsNothingAndOnRecordsSpansThatNest) {
  { Span nowhere("op"); }
  Trace trace("a \"program\"", 3);
  {
    OnLane on(&trace, "forward");
    Span outer("forward");
    {
      static const std::string kept = "layer1.0";
      Span inner("module", "module", &kept, 7);
      tracing()->until_now({.name = "relu", .kind = "op", .where = &kept, .flops = 0, .bytes = 64});
    }
    tracing()->counter("bytes in use", 12);
    trace.record(false);
    Span off("never");
    EXPECT_EQ(tracing(), nullptr);
  }
  EXPECT_EQ(thread_lane(), nullptr);
  ASSERT_EQ(trace.lanes().size(), 1u);
  nlohmann::json j = nlohmann::json::parse(trace.json());
  std::map<std::string, nlohmann::json> by_name;
  for (const auto& e : j["traceEvents"]) by_name[e["name"]] = e;
  EXPECT_EQ(by_name["process_name"]["args"]["name"], "a \"program\"");
  EXPECT_EQ(by_name["thread_name"]["args"]["name"], "forward");
  EXPECT_EQ(by_name["layer1.0"]["cat"], "module");  // a module is shown by its path
  EXPECT_EQ(by_name["layer1.0"]["pid"], 3);
  EXPECT_EQ(by_name["layer1.0"]["args"]["number"], 7);
  EXPECT_EQ(by_name["relu"]["args"]["module"], "layer1.0");
  EXPECT_EQ(by_name["bytes in use"]["args"]["value"], 12);
  EXPECT_EQ(by_name.count("never"), 0u);
  EXPECT_EQ(by_name.count("forward"), 1u);
  expect_nested(j["traceEvents"]);
}

TEST(SeeingTrace, LanesOfSeveralThreadsAndABound) {
  Trace trace("t", 0, 100);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; i++)
    threads.emplace_back([&, i] {
      OnLane on(&trace, "lane " + std::to_string(i));
      for (int k = 0; k < 40 + 30 * i; k++) Span s("work", "op", nullptr, k);
    });
  for (auto& t : threads) t.join();
  ASSERT_EQ(trace.lanes().size(), 4u);
  for (int i = 0; i < 4; i++) {
    const Trace::Lane* lane = trace.find("lane " + std::to_string(i));
    ASSERT_TRUE(lane);
    EXPECT_EQ(lane->events().size(), std::size_t(std::min(100, 40 + 30 * i)));
    EXPECT_EQ(lane->dropped(), std::size_t(std::max(0, 30 * i - 60)));
  }
  EXPECT_TRUE(holds(trace.json(), {"30 later events were dropped"}));
  EXPECT_TRUE(nlohmann::json::accept(trace.json()));
  EXPECT_REFUSED(trace.write("/nowhere/t.json"), "/nowhere/t.json", "cannot be written");
}

// A device that passes a mark every millisecond, the first 5 ms after the trace began, and writes down what it is told.
struct FakeDevice : Follower {
  std::string told;
  std::int64_t marks = 0, passed_ms = 5;
  void enter(const char* name) override { told += std::string("(") + name; }
  void leave() override { told += ")"; }
  void passed(const char* name) override { told += std::string(" ") + name; }
  std::int64_t mark() override { return marks++; }
  std::vector<std::int64_t> times(const std::function<std::int64_t()>&) override {
    std::vector<std::int64_t> all;
    for (; marks > 0; marks--) all.push_back(1'000'000 * passed_ms++);
    return all;
  }
};

TEST(SeeingTrace, ADeviceSeesTheSameSpansLater) {
  FakeDevice device;
  Trace trace;
  trace.follow(&device);
  {
    OnLane on(&trace, "forward");
    Span phase("forward");
    trace.lane("forward").until_now({.name = "conv2d", .kind = "op", .flops = 8e6});
    { Span inner("relu", "op"); }
    trace.lane("forward").counter("bytes", 1);
  }
  EXPECT_EQ(device.told, "(forward conv2d(relu))");
  EXPECT_EQ(trace.find("device: forward"), nullptr) << "nothing is known before collect()";
  std::thread other([&] {
    OnLane on(&trace, "loader");
    Span span("make batch");
  });
  other.join();
  trace.collect();
  const Trace::Lane* lane = trace.find("device: forward");
  ASSERT_NE(lane, nullptr);
  std::vector<std::tuple<std::string, std::int64_t, std::int64_t>> spans;  // counters are the host's
  for (const Trace::Event& e : lane->events()) spans.emplace_back(e.name, e.begin / 1'000'000, e.end / 1'000'000);
  // Marks: follow, forward begins, conv2d ends (from where the phase began to where it was queued), relu begins, relu
  // ends, forward ends.
  ASSERT_EQ(spans, (decltype(spans){{"conv2d", 6, 7}, {"relu", 8, 9}, {"forward", 6, 10}}));
  EXPECT_EQ(lane->events()[0].flops, 8e6);
  EXPECT_EQ(trace.find("device: loader"), nullptr) << "another thread queues nothing";
  EXPECT_TRUE(nlohmann::json::accept(trace.json()));
  const std::int64_t marks = device.marks;
  trace.collect();
  EXPECT_EQ(device.marks, marks) << "without new spans the device is left alone";
  trace.follow(nullptr);
  {
    OnLane on(&trace, "forward");
    Span span("forward");
  }
  EXPECT_EQ(device.marks, marks);
}

// ---- the tape -------------------------------------------------------------------------------------------------------
struct TwoLayers : Module {
  Conv2d& conv = child<Conv2d>("conv", 3, 8, 3, Conv2dOptions{.padding = 1});
  BatchNorm2d& bn = child<BatchNorm2d>("bn", 8, true);
  Linear& fc = child<Linear>("fc", 8, 4);
  Variable forward(const Variable& x) override { return fc(global_average_pool(bn(conv(x)))); }
};

struct SeeingTwoLayers : OnReference {
  TwoLayers model;
  FlatParameters flat{model, *backend, 1};
  Variable y() { return model(Variable(Tensor::full(*backend, {2, 4, 4, 3}, 0.5))); }
};

TEST_F(SeeingTwoLayers, CountsEachSavedStorageOnce) {
  std::map<std::string, std::size_t> saved;
  std::size_t leaves = 0;
  const Variable loss = y();
  for (const TapeEntry& e : tape_of(loss)) {
    if (e.node->leaf()) leaves++;
    saved[e.node->op] += e.saved_bytes;
  }
  EXPECT_EQ(leaves, 6u);
  EXPECT_EQ(saved["conv2d"], 2u * 4 * 4 * 3 * 4);                  // its input; the filter is a parameter
  EXPECT_EQ(saved["batch_norm"], 2u * 4 * 4 * 8 * 4 + 2 * 8 * 4);  // its input, mean and inverse standard deviation
  EXPECT_EQ(saved["average_pool2d"], 0u);
  EXPECT_EQ(saved["linear"], 2u * 8 * 4);
}

TEST_F(SeeingTwoLayers, DotNamesOperationsModulesAndParameters) {
  std::string dot = dot_of(sum(y()));
  EXPECT_TRUE(holds(dot, {"conv2d\\n[2,4,4,8]", "conv.weight\\n[8,3,3,3]", "label=\"bn\"", "average_pool2d", "sum",
                          "saves 384 B", "constant"}));
  EXPECT_EQ(std::count(dot.begin(), dot.end(), '{'), std::count(dot.begin(), dot.end(), '}'));
  std::size_t edges = 0;
  for (std::size_t at = dot.find(" -> "); at != dot.npos; at = dot.find(" -> ", at + 1)) edges++;
  EXPECT_EQ(edges, 1u + 2 + 3 + 1 + 3 + 1);  // conv: constant, w, b; bn: x, γ, β; pool; linear: x, w, b; sum
}

// ---- summaries ------------------------------------------------------------------------------------------------------
TEST(SeeingModels, AreCountedByHand) {
  TwoLayers model;
  ModelSummary s = summary(model, {2, 4, 4, 3});
  ASSERT_EQ(s.modules.size(), 4u);
  EXPECT_EQ(s.modules[0].type, "TwoLayers");
  EXPECT_EQ(s.modules[1].path, "conv");
  EXPECT_EQ(s.modules[1].type, "Conv2d");
  EXPECT_EQ(s.modules[1].output, (Shape{2, 4, 4, 8}));
  EXPECT_EQ(s.modules[1].parameters, 8 * 9 * 3 + 8);
  EXPECT_EQ(s.modules[1].macs, 16.0 * 8 * 27);
  EXPECT_EQ(s.modules[3].macs, 32.0);
  EXPECT_EQ(s.parameters, 224 + 16 + 36);
  EXPECT_EQ(s.macs, 16 * 8 * 27 + 32);
  EXPECT_EQ(s.saved_bytes, 384u + 1024 + 64 + 64);
  EXPECT_GE(s.backward_peak_bytes, s.saved_bytes);
  for (auto& [name, p] : model.parameters()) EXPECT_FALSE(p->variable.defined()) << "summary() left memory behind";
  EXPECT_TRUE(holds(s.text(), {"276 parameters"}));
}

// Multiply-adds and parameters as published: He et al. 2016, torchvision.
TEST(SeeingModels, AreAsLargeAsPublished) {
  for (const auto& [name, classes, side, macs, parameters] :
       {std::tuple{"resnet20", 10, 32, 40.8e6, 0.27e6}, {"resnet18", 1000, 224, 1.814e9, 11.69e6}}) {
    const ModelSummary s = summary(*make_model(name, classes, 3, side), {2, side, side, 3});
    EXPECT_NEAR(s.macs, macs, 0.01 * macs) << name;
    EXPECT_NEAR(double(s.parameters), parameters, 0.01 * parameters) << name;
  }
}

TEST_F(SeeingTwoLayers, SummaryLeavesATrainedModelAsItWas) {
  int fired = 0;
  model.conv.on_forward([&](Module&, const Variable&) { fired++; });
  model.eval();
  Numbers values = flat.values.values(), buffers = flat.buffers.values();
  summary(model, {2, 4, 4, 3});
  EXPECT_EQ(values, flat.values.values());
  EXPECT_EQ(buffers, flat.buffers.values());
  EXPECT_FALSE(model.training());
  EXPECT_EQ(fired, 0);
  NoGrad off;
  y();
  EXPECT_EQ(fired, 1) << "the hook was not put back";
}

// ---- memory ---------------------------------------------------------------------------------------------------------
TEST(SeeingMemory, EachUseIsCountedApart) {
  CachingAllocator memory(heap_memory());
  void *a, *b;
  {
    MemoryUse use(Use::parameters);
    a = memory.take(1000);
    MemoryUse now(Use::activations);
    b = memory.take(3 << 20);
  }
  MemoryStatistics s = memory.statistics();
  EXPECT_EQ(s.live[int(Use::parameters)], 1024u);
  EXPECT_EQ(s.live[int(Use::activations)], std::size_t{3} << 20);
  EXPECT_EQ(s.at_peak, s.live);
  EXPECT_EQ(by_use(s.live), "activations 3.00 MiB, parameters 1.00 KiB");
  memory.give(b);
  memory.give(a);
  s = memory.statistics();
  for (std::size_t bytes : s.live) EXPECT_EQ(bytes, 0u);
  EXPECT_EQ(s.at_peak[int(Use::activations)], std::size_t{3} << 20);
  void* again = memory.take(1000);  // the block that was parameters is nobody's now
  EXPECT_EQ(memory.statistics().live[int(Use::parameters)], 0u);
  EXPECT_EQ(memory.statistics().live[int(Use::other)], 1024u);
  memory.give(again);
}

// ---- a run that is looked at ----------------------------------------------------------------------------------------
// Trains smallcnn for two epochs of eight steps and returns what it said.
struct Looked {
  TemporaryFolder folder;
  FitReport report;
  std::string said, complained, failure;
  Numbers weights;
  explicit Looked(const std::function<void(RunConfig&, const TemporaryFolder&)>& change, double smoothing = 0) {
    auto backend = cpu_backend(1);
    backend->deterministic(true);  // a stopwatch may choose another convolution the second time, and so other last bits
    Dataset data = synthetic({.side = 28, .train = 128, .test = 64});
    Loader train(data.train, {.batch = 16, .drop_last = true, .seed = 1}, *backend);
    Loader test(data.test, {.batch = 32, .shuffle = false}, *backend);
    auto model = make_model("lenet5", 10, 1, 28);
    SGD sgd({.learning_rate = 0.05, .momentum = 0.9});
    RunConfig options{.epochs = 2, .schedule = "constant", .progress = false};
    options.metrics = folder.file("run.jsonl");
    change(options, folder);
    testing::internal::CaptureStdout();
    const auto trained = [&] {
      report = fit(*model, cross_entropy_loss(smoothing), sgd, *backend, {train, nullptr, &test}, options);
    };
    complained = stderr_of([&] { failure = error_of(trained); });
    said = testing::internal::GetCapturedStdout();
    weights = weights_of(*model);
  }
};

TEST(SeeingFit, EverythingAtOnceAndTheSameWeights) {
  Looked plain([](RunConfig&, const TemporaryFolder&) {});
  EXPECT_EQ(plain.said, "");
  Looked all([](RunConfig& o, const TemporaryFolder& f) {
    o.profiler = {.summary = true, .dot = f.file("tape.dot"), .profile = true, .warm_up = 2, .steps = 5};
    o.profiler.trace = f.file("trace.json");
    o.profiler.memory = true;
    o.log_every = 4;
  });
  EXPECT_EQ(plain.weights, all.weights) << "looking changed the training";
  EXPECT_TRUE(holds(all.said, {"(model)", "LeNet5", "multiply-adds per picture", "profile of 5 steps", "conv2d",
                               "GFLOP/s", "memory in one step", "kept for backward by module", "parameters"}));
  EXPECT_EQ(contents(all.folder.file("tape.dot")).rfind("digraph", 0), 0u);

  nlohmann::json trace = nlohmann::json::parse(contents(all.folder.file("trace.json")));
  std::map<int, std::string> lanes;
  std::map<std::string, std::map<std::string, int>> seen;  // lane, name
  for (const auto& e : trace["traceEvents"])
    if (e["name"] == "thread_name") lanes[e["tid"]] = e["args"]["name"];
  for (const auto& e : trace["traceEvents"])
    if (e["ph"] == "X") seen[lanes[e["tid"]]][e["name"]]++;
  EXPECT_EQ(seen["step"]["step"], 5);
  EXPECT_EQ(seen["forward"]["conv2d"], 10);
  EXPECT_EQ(seen["forward"]["conv1"], 5);  // the module
  EXPECT_EQ(seen["backward"]["conv2d"], 10);
  EXPECT_EQ(seen["optimizer"]["optimizer"], 5);
  EXPECT_EQ(seen["evaluation"]["conv2d"], 4);  // the first evaluation: two batches
  EXPECT_GT(seen["loader of synthetic train"]["make batch"], 0);
  expect_nested(trace["traceEvents"]);

  int steps = 0;
  for (const nlohmann::json& line : lines_of(all.folder.file("run.jsonl"))) steps += line["event"] == "step";
  EXPECT_EQ(steps, 4);
}

TEST(SeeingFit, ProfileSumsToTheStep) {
  Trace trace;
  trace.lane("step").add({.name = "step", .kind = "phase", .begin = 0, .end = 10'000'000});
  trace.lane("step").add({.name = "wait for a batch", .kind = "wait", .begin = 10'000'000, .end = 12'000'000});
  const std::string conv1 = "conv1", conv2 = "conv2";
  Trace::Lane &forward = trace.lane("forward"), &backward = trace.lane("backward");
  forward.add({.name = "conv2d", .kind = "op", .where = &conv1, .begin = 0, .end = 1'000'000, .flops = 2e9});
  forward.add({.name = "conv2d", .kind = "op", .where = &conv2, .begin = 0, .end = 2'000'000, .flops = 4e9});
  forward.add({.name = "forward", .kind = "phase", .begin = 0, .end = 3'500'000});
  backward.add({.name = "conv2d", .kind = "op", .where = &conv1, .begin = 0, .end = 3'000'000, .flops = 4e9});
  backward.add({.name = "backward", .kind = "phase", .begin = 0, .end = 5'000'000});
  Profile p = profile_of(trace);
  EXPECT_EQ(p.steps, 1);
  EXPECT_DOUBLE_EQ(p.step_ms, 10);
  EXPECT_DOUBLE_EQ(p.wait_ms, 2);
  EXPECT_DOUBLE_EQ(p.forward_ms, 3.5);
  ASSERT_EQ(p.by_op.size(), 1u);
  EXPECT_DOUBLE_EQ(p.by_op[0].calls, 2);
  EXPECT_DOUBLE_EQ(p.by_op[0].forward_ms, 3);
  EXPECT_DOUBLE_EQ(p.by_op[0].flops, 10e9);
  ASSERT_EQ(p.by_module.size(), 2u);
  EXPECT_EQ(p.by_module[0].module, "conv1");       // 4 ms before 2
  EXPECT_TRUE(holds(p.text(), {"1500 GFLOP/s"}));  // 6 GFLOP in 4 ms
}

TEST(SeeingFit, OneBatchIsLearntByHeartAndItsVerdictCanBeNo) {
  Looked good([](RunConfig& o, const TemporaryFolder&) { o.overfit_batch = true, o.epochs = 1, o.progress = true; });
  EXPECT_TRUE(holds(good.said, {"the model can learn"}));
  EXPECT_TRUE(holds(good.complained, {"of 300 (loss below 0.01)"}));
  EXPECT_LT(good.report.steps, 300);
  auto still = [](RunConfig& o, std::int64_t steps) {
    o.overfit_batch = true, o.epochs = 1, o.stop_after = steps;
    o.schedule = "warmup:1000000+constant";  // a learning rate of nearly nothing
  };
  Looked bad([&](RunConfig& o, const TemporaryFolder&) { still(o, 0); });
  EXPECT_TRUE(holds(bad.failure, {"does NOT learn"}));
  EXPECT_TRUE(holds(contents(bad.folder.file("run.jsonl")), {"\"end\""}));
  Looked brief([&](RunConfig& o, const TemporaryFolder&) { still(o, 5); });
  EXPECT_TRUE(holds(brief.failure, {"cannot tell whether the model learns: too few steps"}));
  EXPECT_EQ(bad.said + brief.said, "") << "a verdict that is none";
  Looked smooth([](RunConfig& o, const TemporaryFolder&) { o.overfit_batch = true, o.epochs = 1; }, 0.1);
  EXPECT_TRUE(holds(smooth.said, {"it learns, but not to zero"})) << smooth.failure;
}

TEST(SeeingFit, WhatNoStepCanFillIsNotWritten) {
  TemporaryFolder run;
  Looked first([&](RunConfig& o, const TemporaryFolder&) { o.checkpoint = run.file("run"); });
  auto looks = [&](RunConfig& o, const TemporaryFolder& f) {
    o.resume = run.file("run");
    o.profiler = {.dot = f.file("tape.dot"), .trace = f.file("trace.json"), .warm_up = 2, .steps = 2};
  };
  Looked nothing(looks);
  for (const char* file : {"tape.dot", "trace.json"}) {
    EXPECT_FALSE(std::filesystem::exists(nothing.folder.file(file)));
    EXPECT_TRUE(holds(nothing.complained, {std::string(file) + ": not written"}));
  }
  Looked third([&](RunConfig& o, const TemporaryFolder& f) {  // steps 17 to 24: those looked at are among them
    looks(o, f);
    o.epochs = 3;
  });
  EXPECT_EQ(third.complained, "");
  EXPECT_TRUE(holds(contents(third.folder.file("trace.json")), {"\"conv2d\""}));

  Looked other([](RunConfig& o, const TemporaryFolder& f) {
    o.profiler.dot = f.file("thesis.dot");
    write_file(o.profiler.dot, "graph of mine {}");
  });
  EXPECT_TRUE(holds(other.failure, {"--dot ", "something else"}));
  EXPECT_EQ(contents(other.folder.file("thesis.dot")), "graph of mine {}");
}

TEST(SeeingFit, SummarySaysWhatThisTrainingKeeps) {
  auto with = [](const std::string& optimizer, double ema) {
    auto backend = reference_backend();
    Dataset data = synthetic({.side = 28, .train = 32, .test = 16});
    Loader train(data.train, {.batch = 16}, *backend);
    auto model = make_model("mlp", 10, 1, 28);
    auto made = make_optimizer({.optimizer = optimizer});
    RunConfig options{.epochs = 1, .progress = false, .ema = ema, .stop_after = 1};
    options.profiler.summary = true;
    testing::internal::CaptureStdout();
    fit(*model, cross_entropy_loss(), *made, *backend, {train}, options);
    std::string said = testing::internal::GetCapturedStdout();
    return said.substr(said.rfind("with parameters and "));
  };
  // mlp: 203,530 parameters, 0.777 MiB; parameters, gradients and one vector are 2.33 MiB, and the tape's part is the
  // same.
  auto mib = [](const std::string& line) { return std::stod(line.substr(line.rfind("MiB") - 5)); };
  const std::string sgd = with("sgd", 0), adamw = with("adamw", 0), average = with("adamw", 0.9);
  EXPECT_EQ(sgd.find("with parameters and sgd "), 0u) << sgd;
  EXPECT_EQ(adamw.find("with parameters and adamw "), 0u) << adamw;
  EXPECT_EQ(average.find("with parameters and adamw and the average "), 0u) << average;
  EXPECT_NEAR(mib(adamw) - mib(sgd), 0.777, 0.02) << sgd << adamw;
  EXPECT_NEAR(mib(average) - mib(adamw), 0.777, 0.02) << average;
}

}  // namespace
}  // namespace tandem::test
