// What a backward pass and a step promise to a loop or an operation of a user's own: passes within passes, gradients of
// what took no part or is frozen, masks that differ, steps that say what they came to.
#include "layers/train/step_graph.h"
#include "tests/replicas.h"
#include "tests/twin.h"

namespace tandem::test {
namespace {

constexpr double nan = std::numeric_limits<double>::quiet_NaN();

struct Engine : testing::Test {
  std::unique_ptr<Backend> owner_ = reference_backend(1);
  Backend& backend_ = *owner_;
  Variable leaf(const Shape& shape, const char* name) {
    return Variable(Tensor::of(backend_, shape, numbers(name, shape.numel())), true, name);
  }
};

TEST_F(Engine, APassWithinAPassIsRefusedByName) {
  Variable x = leaf({3}, "x"), v = leaf({3}, "v");
  Variable trunk = tanh(square(x)), first = sum(trunk * v), second = sum(trunk);
  v.leaf()->hook = [&](Leaf&) { second.backward(); };
  EXPECT_REFUSED(first.backward(), "within a backward pass", "recompute");
  // What threw leaves nothing behind: a later pass is right.
  v.leaf()->hook = nullptr;
  Variable again = sum(tanh(square(x)));
  again.backward();
  EXPECT_TRUE(x.leaf()->has_grad);
}

// ---- what took no part ----------------------------------------------------------------------------------------------
TEST_F(Engine, ALeafThatIsGivenNothingHasAZeroGradient) {
  Sequential model;
  model.add<Linear>(3, 2);
  model.add<Linear>(2, 2);
  FlatParameters flat(model, backend_, 1);
  int hooks = 0;
  flat.on_gradient([&](const ParameterRange&) { hooks++; });
  Variable x(Tensor::full(backend_, {1, 3}, 1));
  flat.backward(sum(model(x)));
  EXPECT_EQ(hooks, 4);
  flat.zero_gradients();
  const Variable& w = *model.parameters()[0].second;
  Variable blocked = record<SilentNode>(w.value().clone(), {&w}, {});
  flat.backward(sum(blocked) + sum(*model.parameters()[3].second));
  EXPECT_EQ(hooks, 8);
  EXPECT_TRUE(flat.gradients_complete());
  EXPECT_EQ(flat.parameter_ranges()[0].leaf->grad.values(), Numbers(6, 0.0)) << "not the step's before";
}

// ---- frozen parameters ----------------------------------------------------------------------------------------------
TEST_F(Engine, AFrozenParameterHasNoGradient) {
  Sequential model;
  model.add<Linear>(3, 4);
  model.add<BatchNorm2d>(4);
  model.add<Linear>(4, 2);
  auto parameters = model.parameters();
  for (int i : {0, 1, 2, 4}) parameters[i].second->frozen = true;  // left: 1.bias, 2.bias
  FlatParameters flat(model, backend_, 1);
  SGD sgd({.learning_rate = 0.1, .momentum = 0.9, .weight_decay = 0.1, .decay_everything = true});
  sgd.clip_norm = 1e9;
  sgd.bind(flat);
  std::vector<std::string> hooks;
  flat.on_gradient([&](const ParameterRange& s) { hooks.push_back(s.name); });
  const Numbers before = flat.values.values();
  Variable x(Tensor::of(backend_, {5, 3}, numbers("x", 15)));
  double squares = 0;
  for (int i = 0; i < 2; i++) {
    flat.zero_gradients();
    Variable loss = sum(square(model(x)));
    flat.backward(loss);
    EXPECT_TRUE(flat.gradients_complete());
    squares = 0;
    for (const ParameterRange& s : flat.parameter_ranges())
      for (double g : s.leaf->grad.values()) {
        squares += g * g;
        EXPECT_TRUE(!s.frozen || g == 0) << s.name;
      }
    sgd.step(&loss.value());
    EXPECT_NEAR(sgd.gradient_norm(), std::sqrt(squares), 1e-4 * std::sqrt(squares));
  }
  EXPECT_EQ(hooks, (std::vector<std::string>{"2.bias", "1.bias", "2.bias", "1.bias"}));
  const Numbers after = flat.values.values();
  for (const ParameterRange& s : flat.parameter_ranges()) {
    const bool same = std::equal(before.begin() + s.local_begin, before.begin() + s.local_begin + s.length,
                                 after.begin() + s.local_begin);
    EXPECT_EQ(same, s.frozen) << s.name;
  }
  // No tape leads to it: its operation, the first, is not even there.
  EXPECT_FALSE((*model.children()[0].second)(x).requires_grad());
}

TEST_F(Engine, FreezingIsForTheNextFlatVector) {
  Sequential model;
  model.add<Linear>(3, 2);
  Parameter& w = *model.parameters()[0].second;
  FlatParameters first(model, backend_, 1);
  Variable x(Tensor::full(backend_, {1, 3}, 1));
  w.frozen = true;
  EXPECT_REFUSED(model(x), "weight", "frozen", "FlatParameters");
  FlatParameters second(model, backend_, 1);
  EXPECT_NO_THROW(second.backward(sum(model(x))));
  w.frozen = false;
  EXPECT_REFUSED(model(x), "weight", "unfrozen", "FlatParameters");
}

// ---- masks ----------------------------------------------------------------------------------------------------------
struct TwoDropouts : Holder {
  Dropout &a = child<Dropout>("a", 0.5), &b = child<Dropout>("b", 0.5);
  Linear& fc = child<Linear>("fc", 2, 2);
};

TEST_F(Engine, TwoDropoutsOfAModelDrawTwoMasks) {
  TwoDropouts model;
  FlatParameters flat(model, backend_, 1);
  SGD sgd({.learning_rate = 0.1});
  sgd.bind(flat, 3);
  Variable x(Tensor::full(backend_, {8, 32}, 1));
  {
    Counters counters(sgd.state());
    Batch batch;
    batch.samples = Tensor::of(backend_, {8}, {0, 1, 2, 3, 4, 5, 6, 7}, DType::i32);
    auto draw = [&] {
      counters.batch(batch);
      return std::vector{model.a(x).value().values(),      model.b(x).value().values(),
                         dropout(x, 0.5).value().values(), model.a(x).value().values(),
                         dropout(x, 0.5).value().values(), model.a(x).value().values()};
    };
    const auto masks = draw();  // also of one module that is called three times
    for (std::size_t i = 0; i < masks.size(); i++)
      for (std::size_t k = 0; k < i; k++) EXPECT_NE(masks[i], masks[k]) << i << " and " << k;
    EXPECT_EQ(masks, draw()) << "the same step draws the same";
    counters.batch(batch);
    const Mode then = mode();
    const auto first = model.a(x).value().values();
    EXPECT_NE(first, model.a(x).value().values());
    mode() = then;
    EXPECT_EQ(first, model.a(x).value().values()) << "a part that runs once more in backward";
  }
  TwoDropouts other;
  FlatParameters others(other, backend_, 9);
  EXPECT_NE(other.a(x).value().values(), other.a(x).value().values()) << "a bare loop draws anew";
}

// ---- names ----------------------------------------------------------------------------------------------------------
TEST_F(Engine, TwoOfOneNameAreRefused) {
  struct Twice : Holder {
    Twice() { child<ReLU>("a"), child<ReLU>("a"); }
  };
  struct Parameters : Holder {
    explicit Parameters(int which) {
      parameter("w", {2}, Initial::zeros());
      if (which == 0) parameter("w", {3}, Initial::zeros());
      if (which == 1) buffer("w", {3}, 0);
      if (which == 2) child<ReLU>("w");
      if (which == 3) child<ReLU>("");
      if (which == 4) child<ReLU>("a.b");
    }
  };
  EXPECT_REFUSED(Twice(), "\"a\"", "already");
  for (int which : {0, 1, 2}) EXPECT_REFUSED(Parameters p(which), "\"w\"", "already") << which;
  EXPECT_REFUSED(Parameters p(3), "name");
  EXPECT_REFUSED(Parameters p(4), "a.b", ".");
  Sequential model;
  model.adopt("1", std::make_unique<ReLU>());
  EXPECT_REFUSED(model.add<ReLU>(), "\"1\"", "already");
}

// ---- steps ----------------------------------------------------------------------------------------------------------
struct Weight : Module {
  Parameter& w = parameter("w", {2}, Initial::constant(1));
  Variable forward(const Variable& x) override { return x * w; }
};

// One weight, whose gradient is x, in a loop of its own.
struct Loop {
  Weight model;
  FlatParameters flat;
  BoundSgd sgd;
  Loop(Backend& backend, double rate) : flat(model, backend, 1), sgd(flat, {.learning_rate = rate}) {}
  Variable backward(double x, double share = 1) {
    flat.zero_gradients();
    Variable loss = sum(model(Variable(Tensor::full(flat.values.backend(), {2}, x))));
    flat.backward(loss, share);
    return loss;
  }
};

TEST_F(Engine, AScheduleInALoopOfOnesOwnWorks) {
  on_backends({DType::f32}, [&](Backend& backend, DType) {
    Loop loop(backend, 1);
    double w = 1;
    for (double rate : {0.5, 0.25, 0.0, 0.125}) {
      loop.sgd.learning_rate(rate);
      loop.sgd.step(&loop.backward(1).value());
      w -= rate;
      EXPECT_EQ(loop.flat.values.values()[0], w) << rate;
    }
  });
}

TEST_F(Engine, AStepSaysWhatItCameTo) {
  for (const BackendKind& kind : backends())
    for (const bool in_loss : {false, true}) {
      auto backend = kind.make();
      Loop loop(*backend, 0.5);
      SGD& sgd = loop.sgd;
      const Tensor& weights = loop.flat.values;
      auto step = [&](double x, double factor = 1) {
        const Tensor loss = Tensor::full(*backend, {}, loop.backward(x).item() * factor);
        return sgd.step(in_loss ? &loss : nullptr);
      };
      const double bad = in_loss ? 1 : HUGE_VAL, factor = in_loss ? nan : 1;
      EXPECT_EQ(step(1), StepResult::made);
      const Numbers values = weights.values();
      EXPECT_TRUE(holds(error_of<NotFinite>([&] { step(bad, factor); }), {"step 2", "not finite"})) << kind.name;
      EXPECT_EQ(weights.values(), values);
      EXPECT_EQ(step(1), StepResult::made) << "the next is as any other";
      EXPECT_NE(weights.values(), values);
      sgd.if_not_finite = IfNotFinite::skip;
      EXPECT_EQ(step(bad, factor), StepResult::not_finite);
      EXPECT_EQ(step(1), StepResult::made);
      EXPECT_EQ(sgd.read_state().step, 3u);
      sgd.if_not_finite = IfNotFinite::wait;
      EXPECT_EQ(step(bad, factor), StepResult::queued);
      EXPECT_EQ(step(1), StepResult::queued);
      EXPECT_EQ(sgd.read_state().step, 3u) << "until somebody has looked";
      EXPECT_EQ(sgd.read_state().not_finite, 1);
    }
}

TEST_F(Engine, ALossScaleThatIsTooLargeIsAnOverflow) {
  Weight model;
  FlatParameters flat(model, backend_, 1);
  SGD sgd({.learning_rate = 0.5});
  sgd.loss_scaling = LossScaling{.first = 1e38f, .most = 1e38f};
  sgd.bind(flat);
  auto step = [&] {
    flat.zero_gradients();
    Variable loss = sum(model(Variable(Tensor::full(backend_, {2}, 1))));
    flat.backward(sgd.scaled(loss));
    return sgd.step(&loss.value());
  };
  EXPECT_EQ(step(), StepResult::overflow);
  StepResult last = StepResult::overflow;
  for (int i = 0; i < 100 && last == StepResult::overflow; i++) last = step();
  EXPECT_EQ(last, StepResult::made);
}

// A step that throws looks at the device, which a recording cannot: it runs eagerly. One that waits is replayed.
TEST_F(Engine, ARecordedStepFollowsTheRate) {
  for (const IfNotFinite what : {IfNotFinite::fail, IfNotFinite::wait}) {
    Twin twin;
    Loop loop(twin, 1);
    loop.sgd.if_not_finite = what;
    Batch batch;
    batch.images = Tensor::full(twin, {2}, 1);
    batch.labels = Tensor::zeros(twin, {1}, DType::i32);
    const auto backward = [&] { loop.sgd.step(&loop.backward(1).value()); };
    StepGraph step(twin, false, {.backward = backward}, "");
    double w = 1;
    for (int i = 0; i < 7; i++) {
      const double rate = 0.5 / (1 << i);
      loop.sgd.learning_rate(rate);
      loop.sgd.sync_hyperparameters();
      step(batch, false);
      loop.flat.count_writes(loop.flat.all());
      w -= rate;
      EXPECT_EQ(loop.flat.values.values()[0], w) << i;
    }
    EXPECT_EQ(twin.log.find('r') == std::string::npos, what == IfNotFinite::fail) << twin.log;
  }
}

// Every rank of a loop of one's own learns that one of them met a loss that is not finite.
TEST_F(Engine, ARanksNaNIsEveryRanksError) {
  std::atomic<int> told{0};
  const auto runs = on_ranks(3, all_reduced(), [&](Strategy& strategy, Ended& run) {
    const int rank = strategy.rank();
    auto backend = reference_backend(1);
    Loop loop(*backend, 0.5);
    strategy.begin(loop.flat, loop.sgd);
    for (int i = 0; i < 4; i++) {
      const Variable loss = loop.backward(i == 1 && rank == 2 ? nan : 1, 1.0 / 3);
      try {
        const bool made = strategy.step(loop.sgd, loss) == StepResult::made;
        require(made && i != 1, "step ", i, " of rank ", rank);
      } catch (const NotFinite&) {
        told += i == 1;
      }
    }
    require(loop.sgd.read_state().step == 3, "rank ", rank);
    strategy.end();
    run.weights = loop.flat.values.values();
  });
  same_bits(runs);
  EXPECT_EQ(told, 3);
}

// More of a gradient that already travels would be lost, or come twice.
TEST_F(Engine, AGradientThatWasHandedOnIsClosed) {
  Sequential model;
  model.add<Linear>(3, 2);
  FlatParameters flat(model, backend_, 1);
  Variable x(Tensor::full(backend_, {1, 3}, 1));
  flat.backward(sum(model(x)), 1, false);
  flat.on_gradient([](const ParameterRange&) {});
  flat.backward(sum(model(x)));
  EXPECT_REFUSED(flat.backward(sum(model(x))), "0.", "exchanged", "zero");
  flat.zero_gradients();
  EXPECT_NO_THROW(flat.backward(sum(model(x))));
}

// The strategy's buckets leave out what is frozen, and the others' sums are those of one machine.
TEST_F(Engine, RanksDoNotExchangeWhatIsFrozen) {
  auto train = [](Strategy& strategy) {
    auto backend = reference_backend(1);
    Sequential model;
    for (int i = 0; i < 3; i++) model.add<Linear>(40, 40);
    model.parameters()[2].second->frozen = true;  // the largest of the middle
    FlatParameters flat(model, *backend, 1);
    BoundSgd sgd(flat, {.learning_rate = 0.01, .momentum = 0.9});
    EXPECT_EQ(flat.trainable().size(), 2u);
    strategy.begin(flat, sgd);
    Variable x(Tensor::of(*backend, {2, 40}, numbers("x", 80)));
    for (int i = 0; i < 3; i++) {
      flat.zero_gradients();
      Variable loss = sum(square(model(x)));
      flat.backward(loss, 1.0 / strategy.size());
      strategy.step(sgd, loss);
    }
    strategy.end();
    return flat.values.values();
  };
  Strategy one;
  const Numbers alone = train(one);
  const auto runs = on_ranks(2, all_reduced({.bucket_bytes = 4096}),
                             [&](Strategy& strategy, Ended& run) { run.weights = train(strategy); });
  same_bits(runs);
  EXPECT_TRUE(close("weights", runs[0].weights, alone, 1e-6));
}

TEST_F(Engine, HyperParametersThatAreNoneAreRefused) {
  for (double bad : {-0.1, nan, HUGE_VAL}) {
    SCOPED_TRACE(bad);
    EXPECT_REFUSED(SGD({.learning_rate = bad}), "learning rate");
    EXPECT_REFUSED(SGD({.momentum = bad}), "momentum");
    EXPECT_REFUSED(SGD({.weight_decay = bad}), "weight decay");
    EXPECT_REFUSED(AdamW({.learning_rate = bad}), "learning rate");
    EXPECT_REFUSED(AdamW({.epsilon = bad}), "epsilon");
    EXPECT_REFUSED(AdamW({.weight_decay = bad}), "weight decay");
    EXPECT_REFUSED(LARS({.learning_rate = bad}), "learning rate");
    EXPECT_REFUSED(LARS({.weight_decay = bad}), "weight decay");
    EXPECT_REFUSED(LARS({.trust = bad}), "trust");
    SGD sgd({.learning_rate = 1});
    EXPECT_REFUSED(sgd.learning_rate(bad), "learning rate");
    EXPECT_EQ(sgd.learning_rate(), 1);
    EXPECT_REFUSED(sgd.gradients_are_sums_of(bad), "sum");
    Weight model;
    FlatParameters flat(model, backend_, 1);
    sgd.clip_norm = bad;
    if (!(bad > 0)) {
      EXPECT_REFUSED(sgd.bind(flat), "clip");
    }
    sgd.clip_norm = 0;
    Weight scaled;
    scaled.w.learning_rate_scale = bad;
    FlatParameters its(scaled, backend_, 1);
    EXPECT_REFUSED(sgd.bind(its), "w", "learning rate");
    Variable x = leaf({4, 3}, "x"), c = leaf({3}, "c");
    Tensor mean = Tensor::zeros(backend_, {3}), var = mean.clone();
    auto norm = [&](const BatchNormOptions& o) { batch_norm(x, c, c, mean, var, o); };
    EXPECT_REFUSED(norm({.epsilon = bad}), "batch_norm", "epsilon");
    EXPECT_REFUSED(norm({.momentum = bad}), "batch_norm", "momentum");
    EXPECT_REFUSED(group_norm(x, 1, c, c, bad), "group_norm", "epsilon");
    EXPECT_REFUSED(layer_norm(x, c, c, bad), "layer_norm", "epsilon");
    EXPECT_REFUSED(dropout(x, bad), "dropout", "p");
    EXPECT_REFUSED(cross_entropy(x, Tensor::zeros(backend_, {4}, DType::i32), bad), "smoothing");
    EXPECT_REFUSED(Ema(flat, bad), "decay");
  }
}

TEST_F(Engine, FitOptionsThatAreNoneAreRefused) {
  const Dataset data = synthetic({.side = 8, .channels = 1, .train = 16, .test = 8, .seed = 3});
  Loader train(data.train, {.batch = 8, .prefetch = 0}, backend_);
  auto fits = [&](const std::function<void(RunConfig&)>& set) {
    Plain model;
    SGD sgd({.learning_rate = 0.1});
    RunConfig options = quiet(1);
    set(options);
    fit(model, cross_entropy_loss(), sgd, backend_, {train}, options);
  };
  EXPECT_NO_THROW(fits([](RunConfig&) {}));
  for (double bad : {-0.1, 1.0, nan}) EXPECT_TRUE(refused([&] { fits([&](RunConfig& o) { o.ema = bad; }); }, {"ema"}));
  EXPECT_TRUE(refused([&] { fits([](RunConfig& o) { o.accumulate = 0; }); }, {"0 batches"}));
  EXPECT_TRUE(refused([&] { fits([](RunConfig& o) { o.epochs = -1; }); }, {"epochs"}));
  EXPECT_TRUE(refused([&] { fits([](RunConfig& o) { o.patience = -1; }); }, {"patience"}));
}

// ---- undefined Variables --------------------------------------------------------------------------------------------
TEST_F(Engine, AnUndefinedVariableIsNamed) {
  Variable none, x = leaf({2, 2}, "x"), w = leaf({2, 2}, "w");
  Tensor labels = Tensor::zeros(backend_, {2}, DType::i32), mean = Tensor::zeros(backend_, {2}), var = mean.clone();
  const std::vector<Variable> both{x, none};
  const std::vector<std::pair<const char*, std::function<void()>>> all = {
      {"relu", [&] { relu(none); }},
      {"cast", [&] { cast(none, DType::f32); }},
      {"scale", [&] { none * 2; }},
      {"add", [&] { none + x; }},
      {"add right", [&] { x + none; }},
      {"sum", [&] { sum(none); }},
      {"max", [&] { max(none); }},
      {"reshape", [&] { reshape(none, {1}); }},
      {"flatten", [&] { flatten(none); }},
      {"transpose", [&] { transpose(none, {0}); }},
      {"slice", [&] { slice(none, 0, 0, 1); }},
      {"cat", [&] { cat(both, 0); }},
      {"pad", [&] { pad(none, 0, 1, 1); }},
      {"matmul", [&] { matmul(x, none); }},
      {"linear", [&] { linear(x, none); }},
      {"linear x", [&] { linear(none, w); }},
      {"conv2d", [&] { conv2d(none, w, {}); }},
      {"max_pool2d", [&] { max_pool2d(none); }},
      {"average_pool2d", [&] { average_pool2d(none); }},
      {"global_average_pool", [&] { global_average_pool(none); }},
      {"batch_norm", [&] { batch_norm(x, none, none, mean, var); }},
      {"group_norm", [&] { group_norm(none, 1, x, x); }},
      {"dropout", [&] { dropout(none, 0.5); }},
      {"log_softmax", [&] { log_softmax(none); }},
      {"cross_entropy", [&] { cross_entropy(none, labels); }},
      {"value", [&] { none.value(); }},
      {"item", [&] { none.item(); }},
      {"backend", [&] { none.backend(); }},
      {"like", [&] { Tensor::like(Tensor()); }},
  };
  for (auto& [name, action] : all) EXPECT_TRUE(refused(action, {"undefined"})) << name;
  EXPECT_FALSE(none.defined());
  EXPECT_NO_THROW(linear(x, w));
}

}  // namespace
}  // namespace tandem::test
