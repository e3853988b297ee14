// The hybrid: a network whose last Linear is cut over the ranks of a host computes, trains, evaluates, saves and
// exports what it does on one machine.
#include "dist/strategies/hybrid.h"
#include "dist/strategies/machine_share.h"
#include "dist/strategies/parameter_server.h"
#include "layers/export/torch_weights.h"
#include "tests/host_ranks.h"
#include "tests/support_channels.h"
#include "tests/twin.h"

namespace tandem::test {
namespace {

// Whole vectors, in the order of the plain model's parameters.
Numbers whole(const FlatParameters& flat, const Tensor& vector, Strategy& strategy) {
  Numbers all;
  for (const ParameterRange& s : flat.parameter_ranges()) {
    const Tensor mine = vector.range(s.local_begin, s.shape);
    for (double v : gather_slices(mine, s.slice, s.whole, &strategy, true).values()) all.push_back(v);
  }
  return all;
}

struct Seen {
  Numbers losses, norms, gradients, weights, state;
};

std::unique_ptr<Optimizer> optimizer_called(const std::string& name) {
  if (name == "sgd") return usual_sgd();
  if (name == "adamw") return std::make_unique<AdamW>(AdamWOptions{.learning_rate = 0.01});
  return std::make_unique<LARS>(LARSOptions{.learning_rate = 0.5});
}

// Epochs of five steps, of which the last has a smaller batch. Of a single epoch also what each step had.
Seen trained_on(Strategy& strategy, Module& model, const Loss& task, Optimizer& optimizer, Backend& backend,
                DType dtype = DType::f64, int epochs = 1, int seed = 100) {
  Seen seen;
  Dataset data = odd_number_of_pictures();
  Loader source(data.train, {.batch = 42, .seed = 5, .rank = strategy.rank(), .world = strategy.size(), .prefetch = 0},
                backend);
  FlatParameters flat(model, backend, std::uint64_t(seed), {}, dtype);  // begin() makes them equal
  optimizer.bind(flat);
  strategy.begin(flat, optimizer);
  Accumulation accumulation(flat, optimizer, 1, source.batches_per_epoch());
  for (int epoch = 0; epoch < epochs; epoch++) {
    strategy.begin_epoch(epoch, {.epochs = epochs, .steps_per_epoch = 5});
    source.start(epoch);
    for (Batch batch; source.next(batch);) {
      accumulation.begin(batch);
      const Variable loss = task(model(Variable(batch.images.cast(dtype))), batch.labels, nullptr);
      accumulation.backward(loss, loss, batch);
      EXPECT_EQ(strategy.step(optimizer, Variable(accumulation.loss())), StepResult::made);
      if (epochs > 1) continue;
      const double size = double(batch.size());
      const MetricSums sum = strategy.sum({.loss = loss.item() * size, .samples = size});
      seen.losses.push_back(sum.loss / sum.samples);
      seen.norms.push_back(optimizer.gradient_norm());
      if (seen.gradients.empty()) seen.gradients = whole(flat, flat.gradients, strategy);
    }
    if (epochs > 1 && strategy.name().find("bsp") == std::string::npos) strategy.end_epoch({.epochs = epoch + 1});
    const Numbers weights = whole(flat, flat.values, strategy);
    seen.weights.insert(seen.weights.end(), weights.begin(), weights.end());
  }
  strategy.end();
  if (epochs > 1) return seen;
  for (auto& [name, vector] : optimizer.vectors())
    for (double v : whole(flat, vector, strategy)) seen.state.push_back(v);
  return seen;
}

void same(const Seen& got, const Seen& want, double first, double last, const std::string& what) {
  EXPECT_EQ(got.losses.size(), 5u);
  EXPECT_TRUE(close(what + ": losses", got.losses, want.losses, last));
  EXPECT_TRUE(close(what + ": gradients of the first step", got.gradients, want.gradients, first));
  EXPECT_TRUE(close(what + ": norms", got.norms, want.norms, last));
  EXPECT_TRUE(close(what + ": weights", got.weights, want.weights, last));
  EXPECT_TRUE(close(what + ": the optimizer's", got.state, want.state, last));
}

// The layer is cut over a host's ranks. Between hosts: "all-reduce", DASO or naive DASO, or an update rule of the
// parameter server.
struct Between {
  std::string how = "all-reduce";
  DType wire = DType::f32;
};

// Ranks as threads, `hosts` times `here` of them.
using Body = std::function<void(Strategy&, int rank)>;
std::vector<std::string> on_hosts(int here, int hosts, double sample, const Body& body, const Between& between = {}) {
  const int n = here * hosts;
  auto grouped = [&] {
    std::vector<std::unique_ptr<Communicator>> all;
    for (int m = 0; m < hosts; m++)
      for (auto& c : in_process(here, {.deadline = 30})) all.push_back(std::move(c));
    return all;
  };
  auto layers = grouped(), machines = grouped();
  NamedStrategies named(n, between.how,
                        {.hosts = hosts,
                         .rounds = {.bucket_bytes = 4096, .deadline = 30},
                         .all_reduce = {.bucket_bytes = 8192, .wire = between.wire}});
  std::vector<std::vector<std::unique_ptr<Channel>>> lanes;
  for (int k = 0; k < here; k++) lanes.push_back(in_process_channels(hosts));
  return ranks_say(n, [&](int r) {
    const auto layer = std::make_shared<SlicedClassifier>(std::move(layers[r]), sample);
    auto strategy = named.of(r, layer);
    if (!strategy) {
      std::vector<int> mine;
      for (int k = 0; k < here; k++) mine.push_back(r / here * here + k);
      strategy = parameter_server(std::move(lanes[r % here][r / here]),
                                  {{.how = Asynchrony::parse(between.how)}, {}, 30, 30, layer},  // 30: seconds
                                  std::make_unique<MachineShare>(std::move(machines[r]), mine, n));
    }
    body(*strategy, r);
  });
}

// What each of them gives, all of which end well.
template <class Gives>
auto given_on_hosts(int here, int hosts, double sample, const Gives& gives, const Between& between = {}) {
  std::vector<decltype(gives(std::declval<Strategy&>(), 0))> all(std::size_t(here * hosts));
  const Body keeps = [&](Strategy& s, int r) { all[r] = gives(s, r); };
  all_well(on_hosts(here, hosts, sample, keeps, between));
  return all;
}

// The pictures' classes are 0 to 9.
Loss of_classes(const Loss& loss, double classes) {
  return [loss, classes](const Variable& outputs, const Tensor& labels, Tensor* correct) {
    Numbers y = labels.values();
    for (double& label : y) label = std::fmod(label, classes);
    return loss(outputs, Tensor::of(labels.backend(), labels.shape(), y, DType::i32), correct);
  };
}

struct Case {
  int classes = 10, here = 2, hosts = 1;
  std::string optimizer = "sgd";
  double smoothing = 0;
  bool bias = true;
  std::string text() const {
    return std::to_string(classes) + " classes over " + std::to_string(here) + " × " + std::to_string(hosts) + ", " +
           optimizer;
  }
};

// A Plain's epoch as `strategy` trains it, clipped, in double.
Seen trained(Strategy& strategy, const Case& c, Backend& backend, DType dtype = DType::f64) {
  Plain model({.classes = c.classes, .bias = c.bias});
  const Task task = prepared(strategy, model, c.smoothing);
  const auto optimizer = optimizer_called(c.optimizer);
  optimizer->clip_norm = 0.2;
  return trained_on(strategy, model, of_classes(task.loss, c.classes), *optimizer, backend, dtype);
}

TEST(Hybrid, TrainsAsOneMachine) {
  std::vector<Case> cases{{.here = 1, .hosts = 2},
                          {.here = 3},
                          {.here = 4, .smoothing = 0.1},
                          {.classes = 7, .here = 3, .hosts = 2, .smoothing = 0.2},
                          {.here = 2, .hosts = 2, .optimizer = "adamw"},
                          {.here = 3, .optimizer = "lars", .bias = false},
                          {.here = 3, .hosts = 2, .optimizer = "lars"},
                          {.classes = 4, .here = 4}};
  for (const Case& c : cases) {
    auto backend = reference_backend(1);
    Strategy one;
    const Seen plain = trained(one, c, *backend);
    EXPECT_GT(plain.norms[0], 0.2) << "clipped";
    const auto on_its_own = [&](Strategy& s, int) { return trained(s, c, *reference_backend(1)); };
    for (const Seen& s : given_on_hosts(c.here, c.hosts, 1, on_its_own)) same(s, plain, 1e-11, 1e-10, c.text());
  }
}

// Without clipping, which is a host's: two epochs of five steps, the whole weights after each.
Numbers epochs_of(Strategy& strategy, std::int64_t classes, int host) {
  auto backend = reference_backend(1);
  Plain model({.classes = classes});
  const Loss loss = of_classes(prepared(strategy, model, 0.1).loss, double(classes));
  return trained_on(strategy, model, loss, *usual_sgd(), *backend, DType::f64, 2, 100 + host).weights;
}

// Hosts that exchange after every batch are one machine. Otherwise DASO is the naive one, in which all groups send
// everything.
TEST(Hybrid, BetweenHostsAnyStrategyMayCarryTheSlices) {
  for (auto [classes, here, hosts] : {std::tuple{10, 2, 2}, {7, 3, 2}, {10, 2, 3}, {10, 1, 2}}) {
    auto of = [&, classes = classes, here = here, hosts = hosts](const std::string& how) {
      const auto epochs = [&](Strategy& s, int r) { return epochs_of(s, classes, r / here); };
      const auto all = given_on_hosts(here, hosts, 1, epochs, {.how = how});
      for (const Numbers& one : all)
        EXPECT_EQ(one, all[0]) << how << ": all ranks have the same whole model after an epoch";
      return all[0];
    };
    Strategy one;
    const Numbers plain = epochs_of(one, classes, 0);
    const std::string text = std::to_string(here) + " × " + std::to_string(hosts) + ", ";
    for (const char* how :
         {"all-reduce", "daso:B=0,warm-up=0,cool-down=0", "daso:bf16=0", "daso:faithful,bf16=0", "bsp"})
      EXPECT_TRUE(close(text + how, of(how), plain, 1e-10));
    for (const std::string how : {"daso:B=2,warm-up=0,cool-down=0", "daso:faithful,B=2,warm-up=0,cool-down=0",
                                  "daso:B=4,W=2,warm-up=0,cool-down=0", "daso", "daso:faithful"})
      EXPECT_TRUE(close(text + how, of(how), of("naive-" + how), 1e-10));
  }
}

// As f32, with gradients that travel as bf16, with a share of the classes, and with machines as workers.
TEST(Hybrid, OnDevicesIsAsOnTheHost) {
  for (const auto& [between, sample] : {std::pair{Between{}, 1.0},
                                        {Between{.wire = DType::bf16}, 1.0},
                                        {Between{}, 0.5},
                                        {Between{.how = "bsp"}, 1.0}}) {
    auto on = [&, between = between, sample = sample](bool device) {
      std::vector<Seen> seen;
      const auto body = [&](Strategy& s, int) {
        std::unique_ptr<Backend> backend = reference_backend(1);
        if (device) backend = std::make_unique<AsynchronousTwin>();
        return trained(s, {.here = 2, .hosts = 2, .smoothing = 0.1}, *backend, DType::f32);
      };
      stderr_of([&] { seen = given_on_hosts(2, 2, sample, body, between); });
      return seen;
    };
    const std::vector<Seen> host = on(false), twins = on(true);
    for (std::size_t r = 0; r < host.size(); r++)
      EXPECT_EQ(twins[r].weights, host[r].weights) << between.how << " " << sample << ", rank " << r;
  }
}

// ---- a batch --------------------------------------------------------------------------------------------------------
// Rows of 20 pictures: the ranks' shares differ.
struct Rows {
  std::int64_t first, last;
  Rows(int rank, int ranks)
      : first(20 * rank / ranks + (rank > 0)), last(rank + 1 == ranks ? 20 : 20 * (rank + 1) / ranks + 1) {}
  Tensor pictures(Backend& b) const {
    return Tensor::of(b, {20, 64}, numbers("pictures", 20 * 64), DType::f64).slice(first, last).clone();
  }
  Tensor labels(Backend& b, int factor) const {
    Numbers y;
    for (std::int64_t i = first; i < last; i++) y.push_back(double(i * factor % 10));
    return Tensor::of(b, {last - first}, y, DType::i32);
  }
};

// Losses of one step by themselves: each rank's loss, and the gradients of all.
struct Step {
  double loss = 0, correct = 0;
  Numbers gradients;
};
using Forward = std::function<Variable(Module&, const Loss&, const Rows&, Backend&, Tensor* correct)>;
Step step_of(Strategy& s, const Forward& forward, std::int64_t classes = 10, double smoothing = 0) {
  auto backend = reference_backend(1);
  Plain model({.classes = classes});
  const Task task = prepared(s, model, smoothing);
  FlatParameters flat(model, *backend, 3, {}, DType::f64);
  BoundSgd sgd(flat, {.learning_rate = 0.1});
  s.begin(flat, sgd);
  const Rows rows(s.rank(), s.size());
  Tensor correct = Tensor::zeros(*backend, {1}, DType::i32);
  const Variable loss = forward(model, task.loss, rows, *backend, &correct);
  flat.zero_gradients();
  flat.backward(loss, double(rows.last - rows.first) / 20);
  s.exchange(loss.value());
  const MetricSums sums = s.sum({.loss = loss.item() * double(rows.last - rows.first), .correct = correct.item()});
  Step step{sums.loss / 20, sums.correct, whole(flat, flat.gradients, s)};
  s.update(sgd, loss.value());
  s.end();
  return step;
}
void same_steps(const std::vector<Step>& got, const Step& want) {
  for (const Step& g : got) {
    EXPECT_NEAR(g.loss, want.loss, 1e-12) << got.size() << " ranks";
    EXPECT_EQ(g.correct, want.correct) << got.size() << " ranks";
    EXPECT_TRUE(close("gradients", g.gradients, want.gradients, 1e-11));
  }
}
void same_step(const Forward& forward, std::int64_t classes = 10) {
  Strategy one;
  const Step want = step_of(one, forward, classes);
  for (int here : {2, 3})
    same_steps(given_on_hosts(here, 1, 1, [&](Strategy& s, int) { return step_of(s, forward, classes); }), want);
}

TEST(Hybrid, CountsAndMixesAsOneMachine) {
  same_step([](Module& model, const Loss& loss, const Rows& rows, Backend& b, Tensor* correct) {
    return loss(model(Variable(rows.pictures(b))), rows.labels(b, 1), correct);
  });
  // mixup: two losses of one output
  same_step([](Module& model, const Loss& loss, const Rows& rows, Backend& b, Tensor* correct) {
    const Variable y = model(Variable(rows.pictures(b)));
    return 0.7 * loss(y, rows.labels(b, 1), correct) + 0.3 * loss(y, rows.labels(b, 3), nullptr);
  });
}

TEST(Hybrid, OfEqualLogitsTheFirstIsTheLargest) {
  for (int label : {0, 1, 5, 9}) {
    const Forward zeros = [&](Module& model, const Loss& loss, const Rows&, Backend& b, Tensor* correct) {
      for (auto& [name, p] : model.parameters()) Tensor(p->variable.value()).fill(0);
      return loss(model(Variable(Tensor::zeros(b, {1, 64}, DType::f64))),
                  Tensor::of(b, {1}, {double(label)}, DType::i32), correct);
    };
    const auto right = given_on_hosts(3, 1, 1, [&](Strategy& s, int) { return step_of(s, zeros).correct; });
    EXPECT_EQ(right, Numbers(3, label == 0 ? 3 : 0)) << label;
  }
}

// ---- a share of the classes -----------------------------------------------------------------------------------------
// The classes that a step learned are those of which the bias has a gradient. Over these alone the plain loss is the
// same.
TEST(Hybrid, ASampledStepIsTheSoftmaxOverTheSampledClasses) {
  constexpr std::int64_t classes = 50;
  const Forward once = [](Module& model, const Loss& loss, const Rows& rows, Backend& b, Tensor* correct) {
    return loss(model(Variable(rows.pictures(b))), rows.labels(b, 1), correct);
  };
  for (double smoothing : {0.0, 0.1})
    for (double sample : {0.1, 0.5, 1.0}) {
      const auto sampled = [&](Strategy& s, int) { return step_of(s, once, classes, smoothing); };
      const std::vector<Step> got = given_on_hosts(3, 1, sample, sampled);
      const Numbers& g = got[0].gradients;
      ASSERT_GT(g.size(), std::size_t(classes));
      std::vector<double> learned;
      for (std::int64_t c = 0; c < classes; c++)
        if (g[g.size() - classes + std::size_t(c)] != 0) learned.push_back(double(c));
      for (int label = 0; label < 10; label++)
        EXPECT_TRUE(std::count(learned.begin(), learned.end(), label)) << "occurs";
      // 17, 17 and 16 classes; the ten that occur are all in the first slice
      const std::size_t want = sample == 0.1 ? 10 + 2 + 2 : sample == 0.5 ? 10 + 9 + 8 : 50;
      EXPECT_EQ(learned.size(), want) << sample;
      Strategy one;
      const Step plain = step_of(
          one,
          [&](Module& model, const Loss&, const Rows& rows, Backend& b, Tensor* correct) {
            const Tensor index = Tensor::of(b, {std::int64_t(learned.size())}, learned, DType::i32);
            const Variable y =
                transpose(embedding(transpose(model(Variable(rows.pictures(b))), {1, 0}), index), {1, 0});
            return cross_entropy(y, rows.labels(b, 1), smoothing, correct);  // labels 0 to 9 keep their places
          },
          classes);
      same_steps(got, plain);
    }
}

// ---- evaluation, files ----------------------------------------------------------------------------------------------
TEST(Hybrid, EvaluatesAndPredictsAsThePlainModel) {
  Strategy one;
  auto seen = [](Strategy& s, int) {
    auto backend = reference_backend(1);
    Dataset data = synthetic({.side = 8, .channels = 1, .train = 20, .test = 61, .seed = 3});
    Loader test(data.test, {.batch = 25, .shuffle = false, .rank = s.rank(), .world = s.size(), .prefetch = 0},
                *backend);
    Plain model;
    const Task task = prepared(s, model);
    FlatParameters flat(model, *backend, 3);
    const Evaluation e = evaluate(model, test, &s, task);
    Numbers all{e.loss, e.accuracy};
    for (double count : confusion_matrix(model, test).values()) all.push_back(s.sum({.correct = count}).correct);
    return all;
  };
  const Numbers want = seen(one, 0);
  for (auto [here, hosts] : {std::pair{2, 1}, {3, 1}, {2, 2}})
    for (const Numbers& got : given_on_hosts(here, hosts, 1, seen))
      EXPECT_TRUE(close("loss, accuracy, confusion matrix", got, want, 1e-6));
}

// The loss of the tested model, its accuracy, what the run said of that, and the weights.
Numbers fitted(Strategy& s, std::int64_t batch, double rate, const RunConfig& o) {
  auto backend = reference_backend(1);
  Dataset data = synthetic({.side = 8, .channels = 1, .train = 203, .test = 61, .seed = 3});
  Loader train(data.train, {.batch = batch, .seed = 2, .prefetch = 0}, *backend),
      test(data.test, {.batch = 50, .shuffle = false}, *backend);
  Plain model;
  SGD sgd({.learning_rate = rate, .momentum = 0.9});
  const FitReport report = fit(model, cross_entropy_loss(0.1), sgd, *backend, {train, nullptr, &test}, o, &s);
  Strategy one;  // after the run every rank has the model
  test.share(0, 1);
  const Evaluation e = evaluate(model, test);
  Numbers all{e.loss, e.accuracy, report.epochs.empty() ? 0 : *report.epochs.back().test_accuracy};
  FlatParameters flat(model, *backend, 1);
  const Numbers weights = whole(flat, flat.values, one);
  all.insert(all.end(), weights.begin(), weights.end());
  return all;
}

// One run: 1 rank, then 4, 3 and 2 with slices, then 1 again. And what is written at the end is the plain model's.
TEST(Hybrid, ARunGoesOnWithAnyNumberOfRanks) {
  TemporaryFolder folder;
  auto run = [](Strategy& s, const RunConfig& o) { return fitted(s, 48, 0.1, o); };
  Strategy one;
  RunConfig o = quiet(4);
  o.ema = 0.8;
  const Numbers want = run(one, o);
  o.checkpoint = folder.file("run");
  o.stop_after = 5;
  run(one, o);
  o.resume = std::exchange(o.checkpoint, "");
  for (auto [here, hosts, stop] : {std::tuple{4, 1, 8}, {3, 1, 11}, {2, 2, 17}}) {
    o.stop_after = stop;
    all_well(on_hosts(here, hosts, 1, [&](Strategy& s, int) { run(s, o); }));
    EXPECT_EQ(position_in(folder.file("run/last.safetensors")).step, stop);
  }
  o.stop_after = 0;
  const auto resumed = [&](Strategy& s, int) { return run(s, o); };
  for (const Numbers& got : given_on_hosts(3, 1, 1, resumed))
    EXPECT_TRUE(close("loss, accuracy and weights", got, want, 1e-4));
  // From the same checkpoint, without a step: the same bytes.
  std::vector<std::string> files;
  o.stop_after = 17;
  for (int here : {1, 3}) {
    o.import_export.export_torch = folder.file("weights" + std::to_string(here));
    o.import_export.export_onnx = folder.file("graph" + std::to_string(here));
    if (here == 1)
      run(one, o);
    else
      all_well(on_hosts(here, 1, 1, [&](Strategy& s, int) { run(s, o); }));
    for (const std::string& file : {o.import_export.export_torch, o.import_export.export_onnx})
      files.push_back(contents(file));
  }
  EXPECT_GT(files[0].size() * files[1].size(), 0u);
  EXPECT_EQ(files[0], files[2]);
  EXPECT_EQ(files[1], files[3]);
}

// Asynchronous machines: rank 0's host evaluates and saves by itself, and another number of ranks reads the file.
TEST(Hybrid, AsynchronousMachinesEvaluateSaveAndGoOn) {
  TemporaryFolder folder;
  auto run = [](Strategy& s, const RunConfig& o) {
    const Numbers all = fitted(s, 24, 0.05, o);
    EXPECT_NEAR(all[1], all[2], 1e-9) << "what the run says of its last weights";
    return Numbers(all.begin() + 3, all.end());
  };
  RunConfig o = quiet(4);
  o.checkpoint = folder.file("run");
  for (auto [here, hosts, how] :
       {std::tuple{2, 2, "asgd-m"}, {3, 2, "ddc-asgd"}, {2, 3, "ssp:1+dc-asgd-a"}, {2, 2, "all-reduce"}}) {
    const auto got = given_on_hosts(here, hosts, 1, [&](Strategy& s, int) { return run(s, o); }, {.how = how});
    for (const Numbers& g : got) EXPECT_EQ(g, got[0]) << how << ": all ranks end with the same model";
    EXPECT_EQ(position_in(folder.file("run/last.safetensors")).epoch, o.epochs) << how;
    Plain plain;
    auto backend = reference_backend(1);
    FlatParameters flat(plain, *backend, 1);
    load_weights(folder.file("run/last.safetensors"), flat);
    Strategy one;
    EXPECT_EQ(whole(flat, flat.values, one), got[0]) << how << ": and the file holds it";
    o.resume = o.checkpoint, o.epochs += 2;
  }
  // Stopped in between, where each machine is at a batch of its own: the file's position is that of its steps.
  o = quiet(4);
  o.checkpoint = folder.file("stopped");
  o.stop_after = 13;
  all_well(on_hosts(2, 2, 1, [&](Strategy& s, int) { run(s, o); }, {.how = "asgd"}));
  const RunPosition at = position_in(folder.file("stopped/last.safetensors"));
  EXPECT_GE(at.step, 13);
  EXPECT_EQ(at.epoch * at.batches + at.batch, at.step);
}

// ---- what is refused ------------------------------------------------------------------------------------------------
struct GoesOn : Plain {
  Variable forward(const Variable& x) override { return scale(Plain::forward(x), 2); }
};
struct NoLinear : Module {
  NoLinear() { parameter("w", {3}, Initial::zeros()); }
  Variable forward(const Variable& x) override { return x; }
};

TEST(Hybrid, WhatCannotBeCutIsRefusedByName) {
  auto says = [](const std::string& text, const std::function<void(Strategy&, Backend&)>& body) {
    for (const std::string& said : on_hosts(3, 1, 1, [&](Strategy&s, int) {
           auto backend = reference_backend(1);
           body(s, *backend);
         }))
      EXPECT_TRUE(holds(said, {text}));
  };
  auto preparing = [&](const std::string& text, auto model, const Task& given) {
    says(text, [&](Strategy& s, Backend&) {
      Task task = given;
      auto mine = model();
      s.prepare(*mine, task, {});
    });
  };
  auto net = [](std::int64_t classes) {
    return [classes] { return std::make_unique<Plain>(PlainSizes{.classes = classes}); };
  };
  preparing("has 2 outputs, and 3 ranks", net(2), classification());
  preparing("train with cross_entropy_loss()", net(10), regression());
  preparing(
      "no Linear at its end", [] { return std::make_unique<NoLinear>(); }, classification());
  preparing(
      "no Linear at its end", [] { return std::make_unique<Linear>(64, 10, true, true); }, classification());
  says("call strategy->prepare(model, task", [](Strategy& s, Backend& b) {
    Plain model;
    FlatParameters flat(model, b, 1);
    BoundSgd sgd(flat, {});
    s.begin(flat, sgd);
  });
  says("the loss of this step is not the task's", [](Strategy& s, Backend& b) {
    Plain model;
    prepared(s, model);
    FlatParameters flat(model, b, 1);
    BoundSgd sgd(flat, {.learning_rate = 0.1});
    s.begin(flat, sgd);
    const Variable loss =
        cross_entropy(model(Variable(Tensor::zeros(b, {2, 64}))), Tensor::of(b, {2}, {0, 1}, DType::i32));
    flat.zero_gradients();
    flat.backward(loss);
    s.step(sgd, loss);
  });
  auto stepped = [&](const std::string& text, auto body) {
    says(text, [&](Strategy& s, Backend& b) {
      GoesOn beyond;
      Plain net;
      Module& model = text.find("goes on") != text.npos ? static_cast<Module&>(beyond) : net;
      const Task task = prepared(s, model);
      FlatParameters flat(model, b, 1);
      body(model, task, Tensor::zeros(b, {2, 64}), Tensor::of(b, {2}, {0, 10}, DType::i32));
    });
  };
  stepped("goes on behind fc2",
          [](Module& m, const Task& t, const Tensor& x, const Tensor& y) { t.loss(m(Variable(x)), y, nullptr); });
  stepped("the label 10, but there are 10 classes",
          [](Module& m, const Task& t, const Tensor& x, const Tensor& y) { t.loss(m(Variable(x)), y, nullptr); });
  stepped("in eval mode", [](Module& m, const Task&, const Tensor& x, const Tensor&) {
    m.eval();
    sum(m(Variable(x))).backward();
  });
  for (const char* name : {"hybrid:", "hybrid:sample=", "hybrid:sample=0", "hybrid:sample=2", "hybrid:share=1"})
    EXPECT_REFUSED(SlicedClassifier::parse(name), name, "sample") << name;
  EXPECT_EQ(SlicedClassifier::parse("hybrid:sample=0.1"), 0.1);
}

// A loss that is not finite on one rank, or a gradient in one slice, ends the step on all.
TEST(Hybrid, AllRanksSkipWhatIsNotFinite) {
  for (auto [name, in_slice] : {std::pair{"sgd", false}, {"sgd", true}, {"lars", true}})
    all_well(on_hosts(3, 1, 1, [&, name = name, in_slice = in_slice](Strategy& s, int r) {
      auto backend = reference_backend(1);
      Plain model;
      const Task task = prepared(s, model);
      FlatParameters flat(model, *backend, 1);
      const auto optimizer = optimizer_called(name);
      optimizer->if_not_finite = IfNotFinite::skip;
      optimizer->bind(flat);
      s.begin(flat, *optimizer);
      for (int step = 0; step < 3; step++) {
        const bool bad = step == 1 && r == 2;
        const Numbers before = flat.values.values();
        Tensor x = Tensor::of(*backend, {2, 64}, numbers("x", 128));
        if (bad && !in_slice) x.fill(std::nan(""));
        const Variable loss = task.loss(model(Variable(x)), Tensor::of(*backend, {2}, {1, 2}, DType::i32), nullptr);
        flat.zero_gradients();
        flat.backward(loss, 1.0 / 3);
        if (bad && in_slice) flat.parameter_range("fc2.bias").leaf->grad.fill(std::nan(""));
        require(s.step(*optimizer, loss) == (step == 1 ? StepResult::not_finite : StepResult::made), "step ", step);
        require((flat.values.values() == before) == (step == 1), "weights of step ", step);
      }
      s.end();
    }));
}

// Rank 0's weights, and the first machine's slices, on all. A slice that differs between two machines is found; between
// slices nothing is compared.
TEST(Hybrid, WhatRanksMustHaveInCommonIsChecked) {
  auto said = [](int machines, const std::function<void(Strategy&, FlatParameters&, int rank)>& then) {
    return on_hosts(2, machines, 1, [&](Strategy& s, int r) {
      auto backend = reference_backend(1);
      Plain model;
      prepared(s, model);
      FlatParameters flat(model, *backend, std::uint64_t(r));
      BoundSgd sgd(flat, {.learning_rate = 0.1});
      s.begin(flat, sgd);
      then(s, flat, r);
      s.end();
    });
  };
  std::vector<Numbers> weights(4);
  all_well(said(2, [&](Strategy& s, FlatParameters& flat, int r) { weights[r] = whole(flat, flat.values, s); }));
  for (const Numbers& w : weights) EXPECT_EQ(w, weights[0]);
  for (int machines : {1, 2}) {
    const auto texts = said(machines, [&](Strategy&, FlatParameters& flat, int r) {
      if (r == 2 * machines - 1) flat.parameter_range("fc2.weight").leaf->value.fill(1);
    });
    for (std::size_t r = 0; r < texts.size(); r++) {
      const bool named = texts[r].find("rank 1 and rank 3 no longer have the same parameters") != std::string::npos;
      EXPECT_TRUE(machines == 1 ? texts[r].empty() : named || r % 2 == 0) << texts[r];
    }
  }
}

// ---- files ----------------------------------------------------------------------------------------------------------
struct OfPictures : Module {  // the cut layer reads pictures in rows
  Linear& fc = child<Linear>("fc", 12, 7);
  Variable forward(const Variable& x) override { return fc(flatten(x)); }
};

TEST(Hybrid, FilesAreThoseOfThePlainModel) {
  TemporaryFolder folder;
  const std::string plain = folder.file("plain"), torch = folder.file("torch");
  auto backend = reference_backend(1);
  OfPictures model;
  FlatParameters flat(model, *backend, 3);
  BoundSgd sgd(flat, {.learning_rate = 0.1, .momentum = 0.9});
  Ema ema(flat, 0.9);
  Tensor velocity = sgd.vectors()[0].second;
  for (const ParameterRange& s : flat.parameter_ranges()) {
    velocity.range(s.local_begin, s.shape).copy_from(Tensor::of(*backend, s.shape, numbers("v" + s.name, s.length)));
    ema.values.range(s.local_begin, s.shape).copy_from(Tensor::of(*backend, s.shape, numbers("a" + s.name, s.length)));
  }
  save_checkpoint(plain, {flat, sgd, &ema}, {.step = 4}, {{"--lr", "0.1"}});
  export_torch(model, *backend, {2, 3, 2}, torch);

  for (int n : {1, 2, 3, 7})
    all_well(on_hosts(n, 1, 1, [&](Strategy& s, int r) {
      const std::string own = r == 0 ? folder.file("own") : "", weights = r == 0 ? folder.file("weights") : "";
      auto mine = reference_backend(1);
      OfPictures cut;
      prepared(s, cut);
      FlatParameters part(cut, *mine, 4);
      BoundSgd steps(part, {.learning_rate = 0.1, .momentum = 0.9});
      Ema average(part, 0.9);
      require(load_checkpoint(plain, {part, steps, &average}).step == 4, "step");
      save_checkpoint(own, {part, steps, &average, &s}, {.step = 4}, {{"--lr", "0.1"}});
      require(r > 0 || contents(own) == contents(plain), "another checkpoint on ", n, " ranks");
      const Numbers loaded = part.values.values();
      part.values.fill(0);
      import_torch(cut, *mine, {2, 3, 2}, torch);
      require(part.values.values() == loaded, "other weights from PyTorch");
      export_torch(cut, *mine, {2, 3, 2}, weights, {}, &s);
      require(r > 0 || contents(weights) == contents(torch), "other weights for PyTorch on ", n, " ranks");
      load_weights(plain, part);
      require(part.values.values() == average.values.values(), "the average");
      Plain other;  // a layer of another size is another model
      FlatParameters others(other, *mine, 4);
      BoundSgd its(others, {.learning_rate = 0.1, .momentum = 0.9});
      EXPECT_REFUSED(load_checkpoint(plain, {others, its}), "another model");
    }));
}

}  // namespace
}  // namespace tandem::test
