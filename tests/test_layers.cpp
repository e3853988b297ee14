// Models, the flat parameters, optimizers, schedules, the training loop, metrics and options.
#include <future>
#include <nlohmann/json.hpp>

#include "core/build_info.h"
#include "tests/training.h"

namespace tandem::test {
namespace {

// Four classes, each a pattern of its own under noise; batches in memory.
class Patterns : public BatchSource {
 public:
  static constexpr int side = 8, classes = 4;
  Patterns(Backend& backend, int pictures, int batch, DType dtype = DType::f32, const std::string& noise = "noise")
      : backend_(backend), pictures_(pictures), batch_(batch), dtype_(dtype), noise_(noise) {}
  void share(int rank, int world) override { shares.push_back({rank, world}); }
  std::int64_t batches_per_epoch() const override { return (pictures_ + batch_ - 1) / batch_; }
  std::int64_t pictures_per_epoch() const override { return pictures_; }
  Batch make(std::int64_t epoch, std::int64_t index) override {
    const std::int64_t begin = index * batch_, n = std::min<std::int64_t>(batch_, pictures_ - begin);
    Numbers pixels, labels, samples;
    for (std::int64_t i = begin; i < begin + n; i++) {
      const int label = int(i % classes);
      const Numbers pattern = numbers("pattern " + std::to_string(label), side * side);
      Numbers picture = numbers(noise_ + " " + std::to_string(i), side * side);
      for (int k = 0; k < side * side; k++) picture[k] = (pattern[k] + 0.7 * picture[k]) * factor + shift;
      if (spoil && index == 2) spoil(picture);
      pixels.insert(pixels.end(), picture.begin(), picture.end());
      labels.push_back(label);
      samples.push_back(double(i));
    }
    Batch b;
    b.images = Tensor::of(backend_, {n, side, side, 1}, pixels, dtype_);
    b.labels = Tensor::of(backend_, {n}, labels, DType::i32);
    b.samples = Tensor::of(backend_, {n}, samples, DType::i32);
    b.index = index, b.epoch = epoch, b.global = n;
    return b;
  }
  std::vector<std::pair<int, int>> shares;
  double factor = 1, shift = 0;
  std::function<void(Numbers&)> spoil;  // of the pictures in the third batch

 private:
  Backend& backend_;
  std::int64_t pictures_, batch_;
  DType dtype_;
  std::string noise_;
};

// ---- models ---------------------------------------------------------------------------------------------------------
using Flat = OnReference;

TEST_F(Flat, TrainAndEvalReachEveryModule) {
  Sequential model;
  model.add<BatchNorm2d>(3);
  Sequential& inner = model.add<Sequential>();
  inner.add<Dropout>(0.5);
  FlatParameters flat(model, *backend, 1);
  Variable x(Tensor::of(*backend, {4, 3}, numbers("x", 12, 5, 9)));
  auto forward = [&] { return model(x).value().values(); };

  EXPECT_TRUE(model.training());
  EXPECT_NE(forward(), forward()) << "dropout draws";
  const Numbers moved = flat.buffers.values();
  EXPECT_GT(moved[0], 0) << "batch norm follows the batches";
  model.eval();
  EXPECT_FALSE(inner.children()[0].second->training());
  EXPECT_EQ(forward(), forward());
  EXPECT_EQ(flat.buffers.values(), moved) << "evaluation changes no statistics";
  model.train();
  EXPECT_TRUE(inner.children()[0].second->training());
}

TEST_F(Flat, ModelsAreRefusedBeforeTheyHaveMemory) {
  Linear layer(3, 2);
  EXPECT_REFUSED(layer(Variable(Tensor::zeros(*backend, {1, 3}))), "parameter", "FlatParameters");
}

// ---- the flat parameters --------------------------------------------------------------------------------------------
TEST_F(Flat, LaysSegmentsOutAlignedAndInOrder) {
  auto model = resnet_cifar(20, 10, 3);
  FlatParameters flat(*model, *backend, 1);
  std::int64_t end = 0, sum = 0;
  for (const ParameterRange& s : flat.parameter_ranges()) {
    EXPECT_EQ(s.global_begin % FlatParameters::alignment, 0) << s.name;
    EXPECT_EQ(s.local_begin, s.global_begin) << s.name;
    EXPECT_GE(s.local_begin, end) << s.name;
    EXPECT_LT(s.local_begin - end, FlatParameters::alignment) << s.name;
    EXPECT_EQ(s.length, s.shape.numel());
    // A parameter is a range of the vector
    EXPECT_EQ(s.leaf->value.raw(), flat.values.range(s.local_begin, s.shape).raw());
    EXPECT_EQ(s.leaf->grad.raw(), flat.gradients.range(s.local_begin, s.shape).raw());
    end = s.local_begin + s.length;
    sum += s.length;
  }
  EXPECT_EQ(sum, flat.parameters());
  EXPECT_EQ(flat.numel() % FlatParameters::cut, 0);
  EXPECT_LT(flat.numel() - end, FlatParameters::cut);
  EXPECT_EQ(flat.gradients.numel(), flat.numel());
  EXPECT_REFUSED(flat.parameter_range("conv9.weight"), "conv9.weight", "conv1.weight");
}

struct Two : Holder {
  Two(std::string first, Shape shape, std::string second = "b") {
    parameter(first, shape, Initial::constant(1));
    parameter(second, {3}, Initial::constant(2));
    buffer("mean", {5}, 0.5);
    buffer("variance", {2}, 1);
  }
};

TEST_F(Flat, LayoutHashKnowsNamesShapesAndPlaces) {
  auto other = cpu_backend(1);
  auto hash = [&](Module&& m, Backend& b, std::uint64_t seed = 1) { return FlatParameters(m, b, seed).layout_hash(); };
  const std::uint64_t h = hash(Two("a", {4, 2}), *backend);
  EXPECT_EQ(h, hash(Two("a", {4, 2}), *other, 2)) << "neither the device nor the values matter";
  for (const auto& [first, shape, second] :
       {std::tuple{"c", Shape{4, 2}, "b"}, {"a", {2, 4}, "b"}, {"b", {3}, "a"}, {"a", {70, 2}, "b"}})
    EXPECT_NE(h, hash(Two(first, shape, second), *backend)) << first << " " << shape;
}

TEST_F(Flat, BuffersAreASecondVector) {
  Two model("a", {4});
  FlatParameters flat(model, *backend, 1);
  ASSERT_EQ(flat.buffer_ranges().size(), 2u);
  EXPECT_EQ(flat.buffer_ranges()[0].name, "mean");
  EXPECT_EQ(flat.buffer_ranges()[1].begin, 64);
  EXPECT_EQ(flat.buffer_ranges()[1].length, 2);
  const Numbers values = flat.buffers.values();
  ASSERT_EQ(values.size(), 128u);
  for (std::int64_t i = 0; i < 128; i++) EXPECT_EQ(values[i], i < 5 ? 0.5 : i == 64 || i == 65 ? 1 : 0) << i;
}

TEST_F(Flat, InitialDrawDependsOnSeedAndPlaceOnly) {
  auto values = [](Backend& backend, std::uint64_t seed) {
    std::unique_ptr<Module> model = resnet_cifar(20, 10, 3);
    return FlatParameters(*model, backend, seed).values.values();
  };
  const Numbers first = values(*reference_backend(1), 1);
  for (const BackendKind& kind : backends())
    for (int threads : {1, 2})
      EXPECT_EQ(first, values(*kind.make_with(threads), 1)) << kind.name << " with " << threads << " threads";
  EXPECT_NE(first, values(*reference_backend(1), 2));

  Linear layer(400, 300);
  EXPECT_DOUBLE_EQ(layer.parameter("weight").initial.high, 0.05) << "U(−1/√400, 1/√400)";
  std::unique_ptr<Conv2d> conv = Conv2d::before_norm(64, 128, 3);
  EXPECT_DOUBLE_EQ(conv->parameter("weight").initial.std, std::sqrt(2.0 / (128 * 9))) << "He et al.: 2 / fan-out";
}

TEST_F(Flat, SecondFlatVectorKeepsTrainedValuesAndStatistics) {
  Tiny model;
  FlatParameters first(model, *backend, 1);
  first.parameter_range("fc.bias").leaf->value.fill(0.125);
  model.buffers()[1].second->tensor.fill(7);
  const Numbers values = first.values.values();
  FlatParameters second(model, *backend, 99);
  EXPECT_EQ(second.values.values(), values);
  EXPECT_EQ(second.buffers.values()[64], 7);
}

TEST_F(Flat, HooksFireOncePerSegmentAndUntouchedOnesGetZero) {
  std::unique_ptr<Module> model = mlp(3, 1, 2);
  FlatParameters flat(*model, *backend, 1);
  flat.gradients.fill(5);  // left over from before: overwritten, or zeroed
  std::vector<std::string> order;
  flat.on_gradient([&](const ParameterRange& s) { order.push_back(s.name); });
  flat.backward(sum(*model->parameters()[3].second));
  ASSERT_EQ(order.size(), 4u);
  EXPECT_EQ(order[0], "fc2.bias") << "the one that took part comes first";
  EXPECT_EQ(flat.parameter_range("fc1.weight").leaf->grad.values(), Numbers(4 * 256, 0.0));
  EXPECT_EQ(flat.parameter_range("fc2.bias").leaf->grad.values(), (Numbers{1, 1, 1}));
  flat.on_gradient(nullptr);
  flat.zero_gradients();
  EXPECT_FALSE(flat.gradients_complete());
}

// ---- optimizers -----------------------------------------------------------------------------------------------------
// One weight matrix and one bias, and gradients set by hand.
struct WeightAndBias : Holder {
  WeightAndBias() {
    parameter("weight", {3, 2}, Initial::constant(1));
    parameter("bias", {2}, Initial::constant(1), false);
  }
};

struct ByHand {
  std::unique_ptr<Backend> owner;
  WeightAndBias model;
  std::unique_ptr<FlatParameters> flat;
  SGD sgd;
  ByHand(const BackendKind& kind, const SGDOptions& options, const std::function<void(Parameter& weight)>& change = {})
      : owner(kind.make()), sgd(options) {
    if (change) change(*model.parameters()[0].second);
    flat = std::make_unique<FlatParameters>(model, *owner, 1);
    sgd.bind(*flat);
  }
  void gradient(double weight, double bias) {
    for (const ParameterRange& s : flat->parameter_ranges()) {
      s.leaf->grad.fill(s.name == "weight" ? weight : bias);
      s.leaf->has_grad = true;
    }
  }
  void step(double weight, double bias) {
    gradient(weight, bias);
    sgd.step();
  }
  double weight() { return flat->parameter_range("weight").leaf->value.values()[5]; }
  double bias() { return flat->parameter_range("bias").leaf->value.values()[1]; }
};

TEST(Training, ScalesFreezesAndDecaysBySegment) {
  for (const BackendKind& kind : backends()) {
    ByHand h(kind, {.learning_rate = 0.1, .weight_decay = 0.25}, [](Parameter& w) { w.learning_rate_scale = 0.5; });
    h.step(2, 2);
    EXPECT_NEAR(h.weight(), 1 - 0.05 * (2 + 0.25), 1e-6) << "scaled, decayed";
    EXPECT_NEAR(h.bias(), 1 - 0.1 * 2, 1e-6) << "no decay on biases";

    ByHand all(kind, {.learning_rate = 0.1, .weight_decay = 0.25, .decay_everything = true});
    all.step(0, 0);
    EXPECT_NEAR(all.bias(), 1 - 0.1 * 0.25, 1e-6);

    const SGDOptions momentum{.learning_rate = 0.1, .momentum = 0.9, .weight_decay = 0.25};
    ByHand f(kind, momentum, [](Parameter& w) { w.frozen = true; });
    for (int i = 0; i < 3; i++) f.step(3, 1);
    EXPECT_EQ(f.weight(), 1) << "frozen";
    EXPECT_NEAR(f.bias(), 1 - 0.1 * (1 + 1.9 + 2.71), 1e-6);
  }
}

TEST(Training, ClipsTheGradientToANorm) {
  for (const BackendKind& kind : backends()) {
    ByHand h(kind, {.learning_rate = 1});
    h.sgd.clip_norm = 2;
    h.step(3, -4);  // norm √(6·9 + 2·16)
    const double norm = std::sqrt(6 * 9 + 2 * 16.0);
    EXPECT_NEAR(h.sgd.gradient_norm(), norm, 1e-5);
    EXPECT_NEAR(h.weight(), 1 - 3 * 2 / norm, 1e-6);
    EXPECT_NEAR(h.bias(), 1 + 4 * 2 / norm, 1e-6);
    const double before = h.weight();
    h.step(0.1, 0.1);  // below the norm: as it is
    EXPECT_NEAR(h.weight(), before - 0.1, 1e-6);
  }
}

TEST(Training, ANonFiniteGradientOrLossChangesNothing) {
  for (const BackendKind& kind : backends())
    for (double bad : {double(NAN), double(INFINITY), -double(INFINITY)})
      for (bool in_loss : {false, true}) {
        ByHand h(kind, {.learning_rate = 0.1, .momentum = 0.9, .weight_decay = 0.1});
        SGD& sgd = h.sgd;
        sgd.if_not_finite = IfNotFinite::wait;
        h.step(1, 1);
        const Numbers values = h.flat->values.values(), velocity = sgd.vectors()[0].second.values();
        h.gradient(in_loss ? 1 : bad, 1);
        Tensor loss = Tensor::full(*h.owner, {}, in_loss ? bad : 1);
        sgd.step(&loss);
        EXPECT_EQ(sgd.read_state().not_finite, 1) << kind.name;
        EXPECT_EQ(sgd.read_state().step, 1u);
        h.step(1, 1);  // nothing until somebody has looked
        EXPECT_EQ(h.flat->values.values(), values) << kind.name << " " << bad;
        EXPECT_EQ(sgd.vectors()[0].second.values(), velocity);
        sgd.clear_not_finite();
        sgd.step();
        EXPECT_NE(h.flat->values.values(), values);
        EXPECT_EQ(sgd.read_state().step, 2u);
      }
}

TEST(Training, StepsAreRefusedOutOfOrder) {
  ByHand h(backends()[0], {.learning_rate = 0.1});
  EXPECT_REFUSED(h.sgd.step(), "backward");
  EXPECT_REFUSED(SGD({.nesterov = true}), "Nesterov");
  EXPECT_REFUSED(SGD({.momentum = 1}), "momentum");
}

// ---- schedules ------------------------------------------------------------------------------------------------------
TEST(Schedules, FollowPyTorch) {
  const Dumps& dumps = Dumps::of("training");
  for (const auto& [name, text] : {std::pair<std::string, const char*>{"lr_step", "step:30:0.1"},
                                   {"lr_multistep", "step:30,60,80:0.2"},
                                   {"lr_cosine", "cosine"},
                                   {"lr_one_cycle", "one-cycle"},
                                   {"lr_warmup_cosine", "warmup:5+cosine"}}) {
    const Schedule schedule = Schedule::parse(text);
    Numbers rates, by_epoch;
    const double base = dumps.attributes(name)["base_lr"];
    for (int step = 0; step < int(dumps.attributes(name)["steps"]); step++) {
      rates.push_back(base * schedule.factor(step, 100, 1));
      by_epoch.push_back(base * schedule.factor(step, 100, 10));
    }
    EXPECT_TRUE(close(name, rates, dumps.at(name + "/lr").values, 1e-12));
    EXPECT_TRUE(name != "lr_step" || by_epoch == Numbers(100, 0.1)) << "30 epochs of ten steps are not over";
  }
}

TEST(Schedules, CountInEpochs) {
  const Schedule steps = Schedule::parse("warmup:2+step:5,8:0.5");
  for (auto [step, factor] : {std::pair{0, 1.0 / 200}, {199, 1}, {499, 1}, {500, 0.5}, {800, 0.25}})
    EXPECT_DOUBLE_EQ(steps.factor(step, 1000, 100), factor) << step;
  EXPECT_EQ(Schedule::parse("constant").factor(7, 10, 5), 1);
  for (const char* text : {"constant", "cosine", "one-cycle", "step:1:0.1", "warmup:1+cosine"})
    for (int total : {1, 2, 3})  // the shortest runs have rates too
      for (int step = 0; step < total; step++) {
        const double f = Schedule::parse(text).factor(step, total, 1);
        EXPECT_TRUE(f >= 0 && f <= 1) << text << " " << step << "/" << total << ": " << f;
      }
}

TEST(Schedules, UnknownFormsAreRefused) {
  for (const char* text : {"", "cosin", "step", "step:", "step:a", "step:0", "step:-3", "step:3:x", "warmup:5",
                           "warmup:x+cosine", "warmup:5+one-cycle", "warmup:5+warmup:5+cosine", "step:nan", "cosine ",
                           "step:3,2:0.1", "step:100,:0.1", "step:5,5"})
    EXPECT_REFUSED(Schedule::parse(text), "schedule") << "'" << text << "'";
}

// ---- fit ------------------------------------------------------------------------------------------------------------
// A tiny network on the reference backend, and what trains it.
struct Small {
  std::unique_ptr<Backend> backend = reference_backend();
  Tiny model;
  SGD sgd;
  Patterns data;
  explicit Small(int pictures, double rate = 0.01) : sgd({.learning_rate = rate}), data(*backend, pictures, 16) {}
  // Calls f when the third batch is made for the first time.
  void at_the_third_batch(std::function<void()> f) {
    data.spoil = [f = std::move(f), met = false](Numbers&) mutable {
      if (!std::exchange(met, true)) f();
    };
  }
  FitReport run(const RunConfig& options, Strategy* strategy = nullptr) {
    return fit(model, cross_entropy_loss(), sgd, *backend, {.train = data}, options, strategy);
  }
};

TEST(Fit, LearnsOnEveryBackendAndType) {
  on_backends({DType::f32, DType::bf16}, [](Backend& backend, DType dtype) {
    Tiny model;
    SGD sgd({.learning_rate = 0.1, .momentum = 0.9, .nesterov = true, .weight_decay = 5e-4});
    Patterns train(backend, 250, 32, dtype), held(backend, 90, 32, dtype, "other noise");
    const RunConfig options{.epochs = 4, .schedule = "one-cycle", .progress = false};
    FitReport report =
        fit(model, cross_entropy_loss(), sgd, backend, {.train = train, .validation = &held, .test = &held}, options);
    ASSERT_EQ(report.epochs.size(), 4u);
    EXPECT_EQ(report.steps, 4 * 8);
    EXPECT_FALSE(report.stopped);
    EXPECT_GT(*report.epochs.back().test_accuracy, 0.95);
    EXPECT_EQ(*report.epochs.back().test_accuracy, *report.epochs.back().validation_accuracy);
    EXPECT_LT(report.epochs.back().train_loss, report.epochs.front().train_loss / 2);
    EXPECT_EQ(train.shares.size(), 1u) << "each source is told its share";
    EXPECT_FALSE(model.training()) << "a trained model is in eval mode";
    EXPECT_EQ(sgd.learning_rate(), 0.1) << "the optimizer's own rate is what it was";
    EXPECT_FALSE(mode().step_state.defined() || mode().samples.defined());

    // The accuracy is that of the model as it is, counted here once more.
    int right = 0;
    NoGrad off;
    for (int b = 0; b < 3; b++) {
      Batch batch = held.make(0, b);
      const Numbers logits = model(Variable(batch.images)).value().values(), labels = batch.labels.values();
      for (std::size_t i = 0; i < labels.size(); i++)
        right += std::max_element(logits.begin() + 10 * i, logits.begin() + 10 * (i + 1)) - logits.begin() - 10 * i ==
                 labels[i];
    }
    EXPECT_DOUBLE_EQ(right / 90.0, *report.epochs.back().test_accuracy);
  });
}

TEST(Fit, SameSeedGivesTheSameWeights) {
  for (const BackendKind& kind : backends()) {
    auto train = [&](std::uint64_t seed) {
      std::unique_ptr<Backend> backend = kind.make();
      backend->deterministic(true);
      Sequential model;
      model.add<Tiny>();
      model.add<Dropout>(0.3);
      SGD sgd({.learning_rate = 0.05, .momentum = 0.9});
      Patterns data(*backend, 64, 16);
      fit(model, cross_entropy_loss(0.1), sgd, *backend, {.train = data}, quiet(2, seed));
      return weights_of(model);
    };
    const Numbers first = train(1);
    EXPECT_EQ(first, train(1)) << kind.name;
    EXPECT_NE(first, train(2)) << kind.name;
  }
}

TEST(Fit, TrainingGoesOnWhereItStopped) {
  Small t(64, 0.05);
  const double first = t.run(quiet(1)).epochs[0].train_loss;
  EXPECT_LT(t.run(quiet(1, 77)).epochs[0].train_loss, first);
}

struct Logarithm : Module {
  Variable forward(const Variable& x) override { return log(x); }
};
struct WithLogarithm : Module {
  Logarithm& squash = child<Logarithm>("squash");
  Linear& fc = child<Linear>("fc", 64, 10);
  Variable forward(const Variable& x) override { return fc(flatten(squash(x))); }
};

TEST(Fit, NonFiniteLossStopsBeforeItDoesHarm) {
  for (const BackendKind& kind : backends()) {
    SCOPED_TRACE(kind.name);
    std::unique_ptr<Backend> backend = kind.make();
    backend->deterministic(true);
    TemporaryFolder folder;
    const SGDOptions sgd_options{.learning_rate = 0.01, .momentum = 0.9, .weight_decay = 0.01};
    WithLogarithm good, bad;
    SGD before(sgd_options), sgd(sgd_options);
    Patterns two(*backend, 32, 16), five(*backend, 80, 16);
    two.factor = five.factor = 0.1;
    two.shift = five.shift = 1;
    fit(good, cross_entropy_loss(), before, *backend, {.train = two}, quiet(1));
    five.spoil = [](Numbers& picture) { picture[7] = 0; };
    const RunConfig options{.epochs = 3, .metrics = folder.file("metrics.jsonl"), .progress = false};
    EXPECT_REFUSED(fit(bad, cross_entropy_loss(), sgd, *backend, {.train = five}, options), "step 3 ",
                   "epoch 1, batch 3", "log in squash", "parameters are those before this step");
    EXPECT_EQ(weights_of(bad), weights_of(good)) << "bit for bit what two steps made";
    EXPECT_EQ(sgd.read_state().not_finite, 1);
    EXPECT_EQ(sgd.read_state().step, 2u);
    EXPECT_EQ(sgd.learning_rate(), 0.01);
    EXPECT_FALSE(mode().check);
    EXPECT_FALSE(mode().step_state.defined());

    const std::vector<nlohmann::json> lines = lines_of(options.metrics);
    EXPECT_EQ(lines.back()["event"], "end");
    const nlohmann::json& last = lines[lines.size() - 2];
    ASSERT_EQ(last["event"], "not_finite");
    EXPECT_EQ(last["step"], 3);
    EXPECT_TRUE(holds(last["reason"].get<std::string>(), {"log in squash"}));

    five.spoil = [](Numbers& picture) { picture[7] = NAN; };
    WithLogarithm again;
    const auto train = [&] { fit(again, cross_entropy_loss(), sgd, *backend, {.train = five}, quiet(1)); };
    EXPECT_TRUE(holds(error_of<NotFinite>(train), {"step 3 ", "pictures"}));
  }
}

TEST(Fit, WritesMetricsAsJsonLines) {
  TemporaryFolder folder;
  Small t(40, 0.05);
  RunConfig options = quiet(2, 5);
  options.metrics = folder.file("metrics.jsonl");
  options.settings = {{"--model", "tiny"}, {"--data-set", ""}, {"--momentum", "0.9"}, {"--batch", "128"}};
  FitReport report = fit(t.model, cross_entropy_loss(), t.sgd, *t.backend, {.train = t.data, .test = &t.data}, options);
  const std::vector<nlohmann::json> lines = lines_of(options.metrics);
  ASSERT_EQ(lines.size(), 4u);
  auto expect = [](const nlohmann::json& line, const nlohmann::json& fields) {
    for (const auto& [name, value] : fields.items()) EXPECT_EQ(line.value(name, nlohmann::json()), value) << name;
  };
  expect(lines[0], nlohmann::json::parse(R"({"event": "start", "parameters": 682, "batches_per_epoch": 3, "seed": 5,
    "optimizer": "sgd", "learning_rate": 0.05, "batch": 16, "model": "tiny", "momentum": 0.9})"));
  expect(lines[0], {{"version", version()}});
  EXPECT_FALSE(lines[0].contains("data-set")) << "what was not given";
  EXPECT_FALSE(lines[0]["host"].get<std::string>().empty());
  for (int e : {1, 2}) {
    expect(lines[e], {{"event", "epoch"}, {"epoch", e}});
    EXPECT_NEAR(lines[e]["train_loss"].get<double>(), report.epochs[e - 1].train_loss, 1e-6);
    EXPECT_NEAR(lines[e]["test_accuracy"].get<double>(), *report.epochs[e - 1].test_accuracy, 1e-6);
    EXPECT_GT(lines[e]["images_per_second"].get<double>(), 0);
    EXPECT_FALSE(lines[e].contains("val_loss"));
  }
  expect(lines[3], {{"event", "end"}, {"steps", 6}, {"stopped", 0}, {"reason", "finished"}});

  options.metrics = folder.file("no/such/folder/m.jsonl");
  EXPECT_THROW(t.run(options), UsageError);
}

TEST(Metrics, AnyTextAndNumberIsWellFormed) {
  const std::string odd = "a\"b\\c\n\t\x01 é";
  const nlohmann::json j = nlohmann::json::parse(json_object({{odd, odd},
                                                              {"big", std::int64_t{-9'223'372'036'854'775'807}},
                                                              {"small", 1.25e-30},
                                                              {"nan", std::nan("")},
                                                              {"infinity", INFINITY}}));
  EXPECT_EQ(j[odd], odd);
  EXPECT_EQ(j["big"], std::int64_t{-9'223'372'036'854'775'807});
  EXPECT_EQ(j["small"], 1.25e-30);
  EXPECT_TRUE(j["nan"].is_null() && j["infinity"].is_null());
  EXPECT_EQ(json_object({}), "{}");
}

TEST(Fit, EvaluationWeighsBatchesAndRestoresTheMode) {
  auto backend = reference_backend();
  Tiny model;
  FlatParameters flat(model, *backend, 1);
  Patterns uneven(*backend, 37, 16), whole(*backend, 37, 37);
  for (bool training : {true, false}) {
    model.train(training);
    const Numbers buffers = flat.buffers.values();
    Evaluation a = evaluate(model, uneven), b = evaluate(model, whole);
    EXPECT_NEAR(a.loss, b.loss, 1e-6);
    EXPECT_EQ(a.accuracy, b.accuracy);
    EXPECT_EQ(model.training(), training);
    EXPECT_EQ(flat.buffers.values(), buffers);
  }
}

struct Witness : Strategy {
  std::string calls;
  int stop_after = 1000, made = 0;
  void prepare(Module&, Task&, const PrepareOptions&) override { calls += "prepare "; }
  FlatMemory memory() override {
    calls += "memory ";
    return {};
  }
  void begin(FlatParameters& flat, Optimizer& o) override {
    calls += "begin ";
    EXPECT_TRUE(flat.values.defined());
    EXPECT_TRUE(o.state().defined());
  }
  void exchange(const Tensor& loss) override {
    calls += "exchange ";
    Strategy::exchange(loss);
  }
  void update(Optimizer& o, const Tensor& loss) override {
    calls += "update ";
    Strategy::update(o, loss);
  }
  void finish(Optimizer&) override {
    calls += "finish ";
    if (++made == stop_after) request_stop();
  }
  EpochEnd end_epoch(const EpochEnd& mine) override {
    calls += "end_epoch ";
    return Strategy::end_epoch(mine);
  }
  Measures end() override {
    calls += "end ";
    return {};
  }
};

TEST(Fit, CallsTheStrategyInOrder) {
  Small t(32);
  Witness witness;
  FitReport report = t.run(quiet(2), &witness);
  const std::string step = "exchange update finish ", epoch = step + step + "end_epoch ";
  EXPECT_EQ(witness.calls, "prepare memory begin " + epoch + epoch + "end ");
  EXPECT_EQ(report.epochs[0].learning_rate, 0.01);

  Witness stopping;
  stopping.stop_after = 3;
  report = t.run(quiet(2), &stopping);
  EXPECT_TRUE(report.stopped);
  EXPECT_EQ(report.steps, 3);
  EXPECT_EQ(report.epochs.size(), 1u);
}

TEST(Fit, RefusesAWarmUpThatIsLongerThanTheRun) {
  Small t(32);
  EXPECT_REFUSED(t.run({.epochs = 2, .schedule = "warmup:3+cosine"}), "warm-up of 3 epochs is longer than the run",
                 "--epochs 2");
}

TEST(Fit, SaysWhenLossOrAccuracyIsThatOfGuessing) {
  TemporaryFolder folder;
  auto backend = cpu_backend(1);
  const Dataset data = synthetic({.side = 8, .channels = 1, .train = 1200, .test = 10, .seed = 3});
  for (const auto& [rate, times] : {std::pair{1e-9, 1.0}, {0.1, 1.0}, {0.01, 10.0}}) {  // the last: a loss above ln(10)
    Loader train(data.train, {.batch = 20, .prefetch = 0}, *backend);
    auto model = make_model("mlp", 10, 1, 8);
    SGD sgd({.learning_rate = rate, .momentum = 0.9});
    const RunConfig o{.metrics = folder.file("metrics"), .progress = false};
    const Loss loss = [times = times](const Variable& logits, const Tensor& labels, Tensor* correct) {
      return times * cross_entropy(logits, labels, 0, correct);
    };
    fit(*model, loss, sgd, *backend, {train}, o);
    EXPECT_EQ(contents(o.metrics).find("that of guessing among 10 classes") != std::string::npos, rate != 0.1) << rate;
  }
}

TEST(Metrics, AreWrittenWhereNothingElseIsLost) {
  TemporaryFolder folder;
  const std::string file = folder.file("results");
  auto holds = [&](const std::string& text) { std::ofstream(file) << text; };
  auto written = [&] {
    MetricsFile(file).write({{"event", std::string("start")}});
    return contents(file);
  };
  const std::string line = "{\"event\":\"start\"}\n";
  EXPECT_EQ(written(), line);
  holds(line + line);
  EXPECT_EQ(written(), line) << "earlier metrics are replaced";
  holds("");
  EXPECT_EQ(written(), line);
  for (const char* precious : {"#!/bin/sh", "{", "{\"events\":1}", "x"}) {
    holds(precious);
    EXPECT_TRUE(refused(written, {"--metrics " + file, "something else than metrics"}));
    EXPECT_EQ(contents(file), precious);
  }
  EXPECT_NO_THROW(MetricsFile("/dev/null").write({}));
}

TEST(Metrics, AFullDiskIsNamed) {
  if (access("/dev/full", W_OK) != 0) GTEST_SKIP() << "there is no /dev/full";
  MetricsFile metrics("/dev/full");
  EXPECT_REFUSED(metrics.write({}), "/dev/full", "could not be written", "No space left");
}

TEST(Fit, StopsAtTheStepAfterSigterm) {
  TemporaryFolder folder;
  Small t(80);
  t.at_the_third_batch([] { std::raise(SIGTERM); });
  const RunConfig options{.epochs = 3, .metrics = folder.file("metrics.jsonl"), .progress = false};
  FitReport report = t.run(options);
  EXPECT_TRUE(report.stopped);
  EXPECT_EQ(report.steps, 3);
  EXPECT_TRUE(holds(contents(options.metrics), {"\"stopped\":1,\"reason\":\"SIGTERM\""}));
  EXPECT_EQ(stopping_signal(), SIGTERM);
  t.run(quiet(1));
  EXPECT_EQ(stopping_signal(), 0);
}

auto sigterm_handler() {
  struct sigaction now {};
  sigaction(SIGTERM, nullptr, &now);
  return now.sa_handler;
}

// Ranks that are threads: one training ends while another goes on, and that one still stops; then signals are as they
// were.
TEST(Fit, SignalsAreTakenUntilTheLastTrainingEnds) {
  std::promise<void> second_began, first_over;
  auto train = [](const std::function<void()>& f) {
    Small t(80);
    t.at_the_third_batch(f);
    return t.run(quiet(1));
  };
  const auto before = sigterm_handler();
  FitReport second;
  std::thread beside;
  const FitReport first = train([&] {
    beside = std::thread([&] {
      second = train([&] {
        second_began.set_value();
        first_over.get_future().wait();
        std::raise(SIGTERM);
      });
    });
    second_began.get_future().wait();
  });
  first_over.set_value();
  beside.join();
  EXPECT_FALSE(first.stopped);
  EXPECT_TRUE(second.stopped);
  EXPECT_EQ(second.steps, 3);  // the batch that spoils is the third
  EXPECT_EQ(stopping_signal(), SIGTERM);
  EXPECT_EQ(before, sigterm_handler());
  train([] {});
  EXPECT_EQ(stopping_signal(), 0);
}

// A rank hears from another that the run ends, and gets the signal of its own only then: the line names the signal all
// the same.
TEST(Fit, ASignalThatComesAfterAnotherRanksStopIsNamed) {
  struct ToldByAnother : Witness {
    Measures end() override {
      std::raise(SIGTERM);
      return {};
    }
  } told;
  told.stop_after = 1;
  Small t(80);
  const std::string said = stderr_of([&] { t.run({.epochs = 3}, &told); });
  EXPECT_TRUE(holds(said, {"stopped after step 1 of 15 (SIGTERM)"}));
}

// A launcher ends the ranks that are left while one of them still takes down its connections: its error is printed all
// the same.
TEST(Fit, AFailedProgramHasTimeToPrintItsError) {
  auto train = [](bool fails) {
    Small t(80);
    if (fails) t.at_the_third_batch([] { throw Error("rank 3 has died"); });
    t.run(quiet(1));
  };
  auto program = [&] {
    try {
      train(true);
    } catch (const Error& e) {
      std::raise(SIGTERM);
      std::fprintf(stderr, "%s", e.what());
      std::_Exit(1);
    }
  };
  EXPECT_EXIT(program(), testing::ExitedWithCode(1), "rank 3 has died");
  const auto before = sigterm_handler();
  EXPECT_THROW(train(true), Error);
  train(false);
  EXPECT_EQ(before, sigterm_handler());
}

// ---- options --------------------------------------------------------------------------------------------------------
using Words = std::vector<std::string>;
RunConfig parsed(const Words& words) { return parsed_options(words); }

TEST(CommandLine, DefaultsStayAndGivenValuesArrive) {
  const RunConfig none = parsed({}), fresh;
  EXPECT_EQ(std::tuple(none.model, none.learning_rate, none.nesterov),
            std::tuple(fresh.model, fresh.learning_rate, fresh.nesterov));
  EXPECT_EQ(std::tuple(none.epochs, none.device, none.dtype), std::tuple(8, "cpu", DType::f32));
  const RunConfig o = parsed_options(
      "--model resnet20 --epochs=3 --batch 7 --lr 0.25 --schedule warmup:5+cosine --augment --seed "
      "18446744073709551615 --dtype bf16 --device cuda:1 --momentum 0 --clip 1.5 --data /somewhere --metrics m.jsonl "
      "--deterministic --weight-decay 1e-4");
  EXPECT_EQ((Words{o.model, o.schedule, o.device, o.data, o.metrics}),
            (Words{"resnet20", "warmup:5+cosine", "cuda:1", "/somewhere", "m.jsonl"}));
  EXPECT_EQ((Numbers{double(o.epochs), double(o.batch), o.learning_rate, o.momentum, o.clip, o.weight_decay}),
            (Numbers{3, 7, 0.25, 0, 1.5, 1e-4}));
  EXPECT_TRUE(o.augment && o.deterministic);
  EXPECT_FALSE(o.exact_conv);
  EXPECT_EQ(o.seed, ~std::uint64_t{0});
  EXPECT_EQ(o.dtype, DType::bf16);
  EXPECT_FALSE(o.nesterov) << "Nesterov's form needs a momentum";
}

testing::AssertionResult refusal(const Words& words, const Words& parts) {
  return holds(error_of<UsageError>([&] { parsed(words); }), parts);
}

TEST(CommandLine, BadValuesAreNamed) {
  const std::pair<Words, Words> table[] = {
      {{"--bogus"}, {"--bogus"}},
      {{"stray"}, {"stray"}},
      {{"--batch"}, {"--batch"}},
      {{"--batch", "99999999999999"}, {"--batch", "from 1 to 1000000000"}},
      {{"--seed", "99999999999999999999"}, {"--seed", "to 18446744073709551615"}},
      {{"--momentum", "1"}, {"--momentum", "0.9999"}},
      {{"--label-smoothing", "1"}, {"--label-smoothing"}},
      {{"--model", "vgg"}, {"--model", "vgg", "resnet18"}},
      {{"--schedule", "linear"}, {"--schedule", "linear", "cosine"}},
      {{"--dtype", "f8"}, {"--dtype", "bf16"}},
      {{"--device", "tpu"}, {"--device", "cuda"}},
      {{"--seed", "-1"}, {"--seed"}},
  };
  for (const auto& [words, parts] : table) EXPECT_TRUE(refusal(words, parts)) << words[0];
  for (const char* value : {"0", "-3", "2.5", "1e3", "many", "", "99999999999999"})
    EXPECT_TRUE(refusal({std::string("--batch=") + value}, {"--batch"})) << value;
  for (const char* value : {"-1", "nan", "inf", "0.1x", "1e7"})
    EXPECT_TRUE(refusal({std::string("--lr=") + value}, {"--lr"})) << value;
}

TEST(CommandLine, WhatCannotBeMeantTogetherIsRefused) {
  TemporaryFolder folder;
  std::filesystem::create_directory(folder.file("run"));
  std::filesystem::create_directory_symlink(folder.file("run"), folder.file("link"));
  const std::string run = folder.file("run"), last = run + "/last.safetensors", link = folder.file("link");
  const std::pair<Words, std::vector<std::string>> table[] = {
      {{"--batch", "64", "--batch-per-rank", "128"}, {"--batch and --batch-per-rank"}},
      {{"--lr-scale", "linear", "--batch", "128"}, {"--lr-scale", "--batch-per-rank"}},
      {{"--patience", "3"}, {"--patience", "add --val"}},
      {{"--mixup", "0.2", "--batch", "1"}, {"--mixup", "batch of 1"}},
      {{"--mixup", "0.2", "--batch-per-rank", "1"}, {"--mixup", "batch of 1"}},
      {{"--log-every", "5"}, {"--log-every", "--metrics"}},
      {{"--resume", run, "--import-torch", "w.safetensors"}, {"--resume", "--import-torch"}},
      {{"--overfit-batch", "--val", "100"}, {"--overfit-batch", "--val"}},
      {{"--overfit-batch", "--epochs", "8"}, {"--overfit-batch", "--epochs"}},
      {{"--overfit-batch", "--checkpoint", run}, {"--overfit-batch", "--checkpoint"}},
      {{"--overfit-batch", "--resume", run}, {"--overfit-batch", "--resume"}},
      {{"--metrics", "x", "--trace", "x"}, {"--metrics and --trace both mean x"}},
      {{"--dot", "./x", "--export-onnx", "a/../x"}, {"--dot and --export-onnx both mean ./x"}},
      {{"--export-torch", "x", "--export-onnx", "x"}, {"--export-torch and --export-onnx"}},
      {{"--import-torch", "x", "--export-torch", "x"}, {"--export-torch and --import-torch"}},
      {{"--checkpoint", run, "--export-torch", last}, {"--export-torch and --checkpoint", last}},
      {{"--checkpoint", link, "--export-torch", last}, {"--export-torch and --checkpoint", last}},
      {{"--checkpoint", "new", "--export-onnx", "new/best.safetensors"}, {"--export-onnx and --checkpoint"}},
      {{"--resume", run, "--trace", last}, {"--trace and --resume"}},
      {{"--resume", last, "--export-torch", last}, {"--export-torch and --resume"}},
      {{"--checkpoint", "new/", "--metrics", "new"}, {"--metrics and --checkpoint"}},
      {{"--tensorboard", "new", "--dot", "new"}, {"--dot and --tensorboard"}},
  };
  for (const auto& [words, parts] : table) EXPECT_TRUE(refusal(words, parts)) << words[0] << " " << words[1];
  const Words accepted[] = {
      {"--resume", run, "--checkpoint", run},           {"--resume", last, "--checkpoint", link},
      {"--tensorboard", run, "--checkpoint", run},      {"--metrics", run + "/metrics.jsonl", "--checkpoint", run},
      {"--overfit-batch", "--stop-after", "20"},        {"--mixup", "0", "--batch", "1"},
      {"--batch-per-rank", "64", "--lr-scale", "sqrt"}, {"--patience", "3", "--val", "100"},
  };
  for (const Words& words : accepted) EXPECT_NO_THROW(parsed(words)) << words[0] << " " << words[1];
}

TEST(CommandLine, DevicesAreMadeOrRefusedWithTheCause) {
  EXPECT_EQ(make_backend({.device = "reference"})->name(), "reference");
  EXPECT_EQ(make_backend({.device = "cpu", .threads = 2})->threads(), 2);
  EXPECT_THROW(make_backend({.device = "cpu", .dtype = DType::f64}), UsageError);
  EXPECT_THROW(make_backend({.device = "cuda:x"}), UsageError);
  if (backends().size() < 3) {
    EXPECT_TRUE(holds(error_of<UsageError>([] { make_backend({.device = "cuda"}); }), {"--device cuda"}));
  }
}

TEST(CommandLine, HelpListsEveryOptionAndExits) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  auto help = [](const char* word) {
    dup2(STDERR_FILENO, STDOUT_FILENO);  // gtest looks at stderr
    parsed({word});
  };
  EXPECT_EXIT(help("--help"), testing::ExitedWithCode(0),
              "Trains a network(.|\n)*--model(.|\n)*smallcnn(.|\n)*--lr(.|\n)*0\\.05(.|\n)*--exact-conv");
  EXPECT_EXIT(help("-h"), testing::ExitedWithCode(0), "--epochs");
}

TEST(CommandLine, TheTableMakesTheIdentity) {
  const RunConfig o = parsed({"--batch", "7", "--dtype", "bf16", "--no-augment"});
  auto identity_of = [](const RunConfig& o) {
    const Settings all = settings_of(o, OptionSpec::Decides::program);
    return std::map<std::string, std::string>(all.begin(), all.end());
  };
  const auto identity = identity_of(o);
  EXPECT_EQ(identity.at("--batch"), "7");
  EXPECT_EQ(identity.at("--dtype"), "bf16");
  EXPECT_EQ(identity.at("--augment"), "no");
  EXPECT_EQ(identity.count("--threads") + identity.count("--metrics"), 0u) << "these do not change the result";
  EXPECT_EQ(identity_of({.batch_per_rank = 5, .accepted = {"--batch"}}).at("--batch"), "5 per rank");
}

TEST(CommandLine, IsReadInOrder) {
  std::string value, log;
  Words files, *taken = nullptr;
  auto read = [&](Words words) {
    value = "none", log = "";
    words.insert(words.begin(), "program");
    std::vector<char*> argv;
    for (std::string& w : words) argv.push_back(w.data());
    std::vector<OptionSpec> specs;
    specs.push_back({"--value", "a value", "5", [&](const std::string& v) {
                       if (v == "bad") throw UsageError("--value bad: expected good");
                       value = v;
                     }});
    specs.push_back({"--on", "a flag", "", [&](const std::string&) { log += "on "; }, true});
    specs.push_back({"--off", "a flag", "", [&](const std::string&) { log += "off "; }, true});
    specs.push_back({"--no-on", "its opposite", "", [&](const std::string&) { log += "no-on "; }, true});
    parse_command_line(int(argv.size()), argv.data(), "A program.", specs, taken);
  };
  // In the order of the command line; a flag given twice is harmless; a negative number is a value.
  const std::pair<Words, std::string> accepted[] = {{{}, "none"},
                                                    {{"--value", "a b"}, "a b"},
                                                    {{"--value=x=y", "--on"}, "x=yon "},
                                                    {{"--off", "--on", "--off"}, "noneoff on off "},
                                                    {{"--value", "-1"}, "-1"}};
  for (const auto& [words, result] : accepted) {
    read(words);
    EXPECT_EQ(value + log, result);
  }
  const std::pair<Words, std::string> refusals[] = {
      {{"--value", "bad"}, "--value bad: expected good"},
      {{"--valu", "1"}, "unknown option --valu (--help lists the options)"},
      {{"--foo=1", "--bar", "x"}, "unknown option --foo (--help lists the options)"},
      {{"x", "y", "--on", "--foo"}, "unexpected argument x (--help lists the options)"},
      {{"--on", "--value"}, "--value needs a value"},
      {{"--value", "--on"}, "--value needs a value"},
      {{"--value", "--on", "x"}, "--value needs a value"},
      {{"--value", ""}, "--value needs a value"},
      {{"--value="}, "--value needs a value"},
      {{"--on=false"}, "--on takes no value"},
      {{"--value", "1", "--on", "--value=2"}, "--value is given twice (1 and 2)"},
      {{"--value", "1", "--value=1"}, "--value is given twice (1 and 1)"},
      {{"--on", "--no-on"}, "--on and --no-on contradict each other"},
      {{"--no-on", "--on"}, "--on and --no-on contradict each other"},
  };
  for (const auto& each : refusals) EXPECT_EQ(error_of<UsageError>([&] { read(each.first); }), each.second);
  taken = &files;
  read({"a", "--value", "v", "b"});
  EXPECT_EQ(value, "v");
  EXPECT_EQ(files, (Words{"a", "b"}));
  EXPECT_REFUSED(read({"a", "--bogus"}), "unknown option --bogus");
  char program[] = "program", word[] = "word", *argv[] = {program, word};
  EXPECT_REFUSED(parse_command_line(2, argv, "A program without options.", {}, nullptr),
                 "unexpected argument word: this program takes none");
  EXPECT_NO_THROW(parse_command_line(1, argv, "A program without options.", {}, nullptr));
}

TEST(CommandLine, ProgramsEndWithTheRightStatus) {
  // A program whose last training was stopped by a signal ends with that signal's status: the last one in this process
  // is not.
  Small(80).run(quiet(1));
  char name[] = "/some/where/program", *argv[] = {name};
  auto status = [&](std::function<void()> body) {
    int s = 0;
    const std::string said = stderr_of([&] { s = run_program(1, argv, body); });
    if (s) {
      EXPECT_EQ(said.find("program: "), 0u) << said;
      EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
    }
    return s;
  };
  EXPECT_EQ(status([] {}), 0);
  EXPECT_EQ(status([] { throw UsageError("--lr x"); }), 2);
  EXPECT_EQ(status([] { throw NotFinite("step 3"); }), 1);
  EXPECT_EQ(status([] { fail("something"); }), 1);
  EXPECT_EQ(status([] { throw std::bad_alloc(); }), 1);
}

}  // namespace
}  // namespace tandem::test
