// What a training run rests on beside the loop itself: optimizers, averages, accumulation, checkpoints, early stop.
#include <nlohmann/json.hpp>

#include "core/files/safetensors.h"
#include "tests/training.h"

namespace tandem::test {
namespace {

// Convolution, batch norm, dropout: everything a checkpoint must carry on.
struct Small : Module {
  Conv2d& conv = adopt("conv", Conv2d::before_norm(1, 16, 3));
  BatchNorm2d& bn = child<BatchNorm2d>("bn", 16, true);
  Dropout& drop = child<Dropout>("drop", 0.3);
  Linear& fc = child<Linear>("fc", 16 * 16, 10);
  Variable forward(const Variable& x) override { return fc(drop(flatten(max_pool2d(bn(conv(x)))))); }
};

using Runs = OnReference;

Dataset pictures(std::int64_t train = 376, std::int64_t held = 100) {
  return synthetic({.side = 8, .channels = 1, .train = train, .test = held, .seed = 3});
}

// ---- optimizers -----------------------------------------------------------------------------------------------------
std::unique_ptr<Optimizer> optimizer_of(Attributes a) {
  const double rate = a["lr"], decay = a["weight_decay"];
  if (a["op"] == "lars") return std::make_unique<LARS>(LARSOptions{rate, a["momentum"], decay, a["trust"]});
  if (a["op"] == "rmsprop")
    return std::make_unique<RMSprop>(
        RMSpropOptions{.learning_rate = rate, .alpha = a["alpha"], .momentum = a["momentum"], .weight_decay = decay});
  if (a["op"] == "adam")
    return std::make_unique<Adam>(
        AdamOptions{.learning_rate = rate, .beta1 = a["beta1"], .beta2 = a["beta2"], .weight_decay = decay});
  if (a["op"] == "adamw")
    return std::make_unique<AdamW>(
        AdamWOptions{.learning_rate = rate, .beta1 = a["beta1"], .beta2 = a["beta2"], .weight_decay = decay});
  return std::make_unique<SGD>(SGDOptions{
      .learning_rate = rate, .momentum = a["momentum"], .nesterov = a["nesterov"] == 1, .weight_decay = decay});
}

TEST(Optimizers, FollowPyTorchAndTheFormula) {
  const Dumps& dumps = Dumps::of("training");
  std::vector<std::pair<std::unique_ptr<Backend>, DType>> runs;
  runs.push_back({reference_backend(), DType::f64});
  for (const BackendKind& kind : backends()) runs.push_back({kind.make(), DType::f32});

  for (const std::string name : {"tiny_sgd", "tiny_momentum", "tiny_nesterov", "tiny_weight_decay", "tiny_adamw",
                                 "tiny_adamw_plain", "tiny_adam", "tiny_rmsprop", "tiny_rmsprop_momentum", "tiny_lars"})
    for (auto& [backend, dtype] : runs) {
      SCOPED_TRACE(name + " on " + backend->name() + " " + name_of(dtype));
      const Attributes a = dumps.attributes(name);
      std::unique_ptr<Optimizer> optimizer = optimizer_of(a);
      const bool sgd = optimizer->name() == "sgd", lars = optimizer->name() == "lars";
      // The dumps hold f32, and so do the optimizer's rates.
      const double tolerance = (dtype == DType::f64 ? 1e-6 : 1e-4) * (sgd ? 1 : dtype == DType::f64 ? 2 : 5);
      Tiny model;
      for (auto& [parameter, p] : model.parameters()) {
        if (lars && !p->decay) p->learning_rate_scale = a["vectors"];
        if (!sgd && !lars && p == model.parameters()[1].second) p->frozen = true;
      }
      FlatParameters flat(model, *backend, 1, {}, dtype);
      for (const ParameterRange& s : flat.parameter_ranges())
        s.leaf->value.copy_from(dumps.at("tiny/" + s.name).on(*backend, dtype));
      optimizer->bind(flat);
      Variable x(dumps.at("tiny/x").on(*backend, dtype));
      Tensor labels = dumps.at("tiny/labels").on(*backend, DType::i32);
      Numbers losses;
      for (int step = 0; step < int(a["steps"]); step++) {
        flat.zero_gradients();
        Variable loss = cross_entropy(model(x), labels);
        flat.backward(loss);
        if (step == 0 && sgd)
          for (const ParameterRange& s : flat.parameter_ranges()) {
            // A bias before batch norm has no gradient but rounding.
            const double floor = s.name == "conv1.bias" ? 0.1 : 1e-6;
            EXPECT_TRUE(close(s.name + ".grad", s.leaf->grad.values(), dumps.at("tiny/" + s.name + ".grad").values,
                              tolerance, floor));
          }
        optimizer->step(&loss.value());
        losses.push_back(loss.item());
      }
      EXPECT_EQ(optimizer->read_state().step, losses.size());
      EXPECT_TRUE(close("losses", losses, dumps.at(name + "/losses").values, tolerance));
      for (const ParameterRange& s : flat.parameter_ranges())
        EXPECT_TRUE(close(s.name, s.leaf->value.values(), dumps.at(name + "/" + s.name).values, tolerance));
      for (auto& [buffer, s] : model.buffers()) {
        if (!sgd) break;
        EXPECT_TRUE(close(buffer, s->tensor.values(), dumps.at(name + "/" + buffer).values, tolerance));
      }
      Numbers padding = flat.values.values();  // is zero and stays zero
      for (const ParameterRange& s : flat.parameter_ranges())
        std::fill_n(padding.begin() + s.local_begin, s.length, 0.0);
      EXPECT_EQ(padding, Numbers(padding.size(), 0.0));
    }
}

TEST_F(Runs, LoadersAreWhatTheOptionsSay) {
  const Dataset data = pictures(100, 30);
  RunConfig o{.batch = 32};
  Loaders all(data, o, *backend);
  EXPECT_EQ(all.train.pictures().count(), 100);
  EXPECT_EQ(all.train.batches_per_epoch(), 3);  // the last, of four pictures, is left out
  EXPECT_EQ(all.test.pictures_per_epoch(), 30);
  EXPECT_FALSE(all.validation);
  EXPECT_EQ(FitData(all).validation, nullptr);

  o.val = 80, o.augment = o.reflect = true, o.cutout = 3, o.mixup = 0.2;
  EXPECT_EQ(Loaders(data, o, *backend).train.options().batch, 8);  // the program's batch is for more pictures
  o.given = {{"--batch", "64"}};
  EXPECT_REFUSED(Loaders(data, o, *backend), "20 pictures do not fill a batch of 32", "a smaller --batch or --val");
  o.batch_per_rank = 9;
  Loaders few(data, o, *backend);
  EXPECT_REFUSED(few.train.share(1, 3), "do not fill a batch of 27 over all ranks", "fewer ranks");
  few.train.share(1, 2);
  EXPECT_EQ(few.train.pictures_per_epoch(), 18);
  EXPECT_EQ(FitData(few).validation->pictures_per_epoch(), 80);
  EXPECT_EQ(few.train.options().augment.pad_crop, 4);
  EXPECT_TRUE(few.train.options().augment.reflect);
  EXPECT_EQ(few.train.options().augment.cutout, 3);
  EXPECT_EQ(few.train.options().mixup, 0.2);
  EXPECT_FALSE(few.validation->options().shuffle);
  EXPECT_EQ(few.test.description().at("side"), "8");
  EXPECT_THROW(Loaders(data, (o.val = 100, o), *backend), UsageError);
}

// Buckets and shards are measured one by one and added up.
TEST(Optimizers, LarsMeasuresInRanges) {
  on_backends({DType::f32}, [&](Backend& backend, DType) {
    std::unique_ptr<Module> model = mlp(10, 1, 8);
    FlatParameters flat(*model, backend, 1);
    const Numbers g = numbers("gradient", flat.parameters());
    std::int64_t at = 0;
    Numbers want{0};
    for (const ParameterRange& s : flat.parameter_ranges()) {
      Numbers part(g.begin() + at, g.begin() + at + s.length);
      s.leaf->grad.copy_from(Tensor::of(backend, s.shape, part));
      s.leaf->has_grad = true;
      at += s.length;
      for (const Numbers& v : {s.leaf->value.values(), part})
        want.push_back(std::inner_product(v.begin(), v.end(), v.begin(), 0.0));
      want[0] += want.back();
    }
    LARS lars({});
    lars.bind(flat);
    lars.measure(flat.all(), false);
    EXPECT_TRUE(close("sums", lars.sums().values(), want, 1e-6));
    EXPECT_NEAR(lars.gradient_norm(), std::sqrt(want[0]), 1e-4);
    lars.measure({1024, 2048}, false);  // in the middle of the first matrix
    lars.measure({2048, flat.numel()}, true);
    lars.measure({0, 1024}, true);
    EXPECT_TRUE(close("sums of three ranges", lars.sums().values(), want, 1e-6));
  });
}

TEST(Optimizers, OptionsAreCheckedAndChosen) {
  EXPECT_REFUSED(AdamW({.beta2 = 1}), "AdamW", "beta");
  EXPECT_REFUSED(LARS({.momentum = -1}), "LARS", "momentum");
  auto parsed = [](const std::string& line) { return parsed_options(line); };
  auto made = [&](const std::string& line) { return make_optimizer(parsed(line)); };
  for (const char* name : {"sgd", "adamw", "adam", "lars", "rmsprop"})
    EXPECT_EQ(made(std::string("--optimizer ") + name)->name(), name);
  EXPECT_EQ(made("")->name(), "sgd");
  std::unique_ptr<Optimizer> adamw = made("--optimizer adamw --clip 2");
  EXPECT_EQ(adamw->learning_rate(), 1e-3) << "its own default";
  EXPECT_EQ(adamw->clip_norm, 2);
  EXPECT_EQ(parsed("--optimizer adamw").weight_decay, 0.01);
  EXPECT_EQ(made("--lr 0.5 --optimizer adamw")->learning_rate(), 0.5);
  EXPECT_EQ(parsed("--optimizer adam").weight_decay, 0);
  EXPECT_EQ(parsed("--optimizer rmsprop").momentum, 0);
  EXPECT_EQ(parsed("--optimizer rmsprop --momentum 0.5").momentum, 0.5);
  EXPECT_REFUSED(RMSprop({.alpha = 1}), "RMSprop", "alpha");
  EXPECT_REFUSED(parsed("--optimizer adagrad"), "--optimizer adagrad", "adamw");
  EXPECT_REFUSED(parsed("--mixup 5"), "--mixup 5");
}

// ---- averages -------------------------------------------------------------------------------------------------------
TEST(Averages, FollowTheFormulaAndSwapExactly) {
  on_backends({DType::f32}, [&](Backend& backend, DType) {
    Small model;
    FlatParameters flat(model, backend, 1);
    BoundSgd sgd(flat, {.learning_rate = 0.1});
    Ema ema(flat, 0.3);
    Numbers average = flat.values.values();
    for (int t = 1; t <= 5; t++) {
      for (const ParameterRange& s : flat.parameter_ranges()) {
        s.leaf->grad.copy_from(Tensor::of(backend, s.shape, numbers(s.name + std::to_string(t), s.shape.numel())));
        s.leaf->has_grad = true;
      }
      flat.buffers.fill(t);
      sgd.step();
      ema.update(sgd);
      const Numbers now = flat.values.values();
      const double d = std::min(0.3, (1.0 + t) / (10 + t));
      for (std::size_t i = 0; i < now.size(); i++) average[i] = d * average[i] + (1 - d) * now[i];
    }
    EXPECT_TRUE(close("average", ema.values.values(), average, 1e-6));
    EXPECT_GT(ema.buffers.values()[0], 4);
    EXPECT_LT(ema.buffers.values()[0], 5);

    const Numbers raw = flat.values.values(), held = ema.values.values();
    const std::uint64_t writes = flat.parameter_ranges()[0].writes->now();
    {
      Ema::Shown shown(ema);
      EXPECT_EQ(flat.values.values(), held);
      EXPECT_NE(flat.parameter_ranges()[0].writes->now(), writes) << "prepared weights must be made anew";
    }
    EXPECT_EQ(flat.values.values(), raw);
    EXPECT_EQ(ema.values.values(), held);

    Tensor loss = Tensor::full(backend, {}, NAN);  // a step that is not applied leaves the average alone
    sgd.if_not_finite = IfNotFinite::skip;
    EXPECT_EQ(sgd.step(&loss), StepResult::not_finite);
    ema.update(sgd);
    EXPECT_EQ(ema.values.values(), held);
  });
}

TEST_F(Runs, AveragesAreWhatFitEvaluatesAndLeaves) {
  Dataset data = pictures();
  Loader train(data.train, {.batch = 16, .seed = 1}, *backend),
      test(data.test, {.batch = 50, .shuffle = false}, *backend);
  Small model;
  SGD sgd({.learning_rate = 0.05, .momentum = 0.9});
  const RunConfig options{.epochs = 2, .progress = false, .ema = 0.9};
  FitReport report = fit(model, cross_entropy_loss(), sgd, *backend, {train, nullptr, &test}, options);
  Evaluation e = evaluate(model, test);
  EXPECT_EQ(e.loss, *report.epochs.back().test_loss);
  Small raw;
  SGD again({.learning_rate = 0.05, .momentum = 0.9});
  fit(raw, cross_entropy_loss(), again, *backend, {train}, quiet(2));
  EXPECT_NE(weights_of(model), weights_of(raw)) << "the average is another";
}

// ---- accumulation ---------------------------------------------------------------------------------------------------
TEST(Accumulating, IsTheMeanOverAllPicturesOfTheStep) {
  on_backends({DType::f32}, [&](Backend& backend, DType) {
    Dataset data = pictures(50);  // batches of 8: six whole ones and one of 2; steps of 24, 24 and 2
    auto train = [&](std::int64_t batch, int accumulate, double clip, double* loss) {
      Loader loader(data.train, {.batch = batch, .seed = 5}, backend);
      Plain model;
      SGD sgd({.learning_rate = 0.1, .momentum = 0.9});
      sgd.clip_norm = clip;
      const RunConfig options{.epochs = 3, .progress = false, .accumulate = accumulate};
      FitReport report = fit(model, cross_entropy_loss(), sgd, backend, {loader}, options);
      EXPECT_EQ(report.steps, 9);
      *loss = report.epochs.back().train_loss;
      return weights_of(model);
    };
    for (double clip : {0.0, 0.5}) {
      double one, three;
      const Numbers whole = train(24, 1, clip, &one), parts = train(8, 3, clip, &three);
      EXPECT_TRUE(close(backend.name(), parts, whole, 1e-5));
      EXPECT_NEAR(one, three, 1e-5);
    }
  });
}

TEST_F(Runs, HooksFireOnceAnAccumulatedStepAndABadBatchIsFound) {
  Dataset data = pictures(48);
  Loader loader(data.train, {.batch = 8, .prefetch = 0}, *backend);
  Plain model;
  FlatParameters flat(model, *backend, 1);
  BoundSgd sgd(flat, {.learning_rate = 0.1});
  Accumulation accumulation(flat, sgd, 4, loader.batches_per_epoch());
  EXPECT_EQ(accumulation.steps_per_epoch(), 2);
  int hooks = 0, steps = 0;
  flat.on_gradient([&](const ParameterRange&) { hooks++; });
  loader.start(0);
  for (Batch batch; loader.next(batch);) {
    accumulation.begin(batch);
    Variable loss = cross_entropy(model(Variable(batch.images)), batch.labels);
    if (!accumulation.backward(loss, batch)) continue;
    sgd.step(&accumulation.loss());
    EXPECT_EQ(hooks, 4 * ++steps);
  }
  EXPECT_EQ(steps, 2);

  const auto spoil = [](Batch& b) {
    if (b.epoch == 1 && b.index == 1) b.images.fill(NAN);
  };
  Loader bad(data.train, {.batch = 8, .prefetch = 0, .transform = spoil}, *backend);
  const RunConfig options{.epochs = 2, .progress = false, .accumulate = 2};
  EXPECT_REFUSED(fit(model, cross_entropy_loss(), sgd, *backend, {bad}, options), "step 4 ", "epoch 2, batch 2",
                 "pictures");
}

// ---- mixup ----------------------------------------------------------------------------------------------------------
TEST_F(Runs, MixupsLossIsTheMixtureOfTwoLosses) {
  Batch batch;
  batch.labels = Tensor::of(*backend, {2}, {1, 0}, DType::i32);
  Variable logits(Tensor::of(*backend, {2, 3}, {1, 2, 3, 0.5, 0, 2}), true);
  Loss loss = cross_entropy_loss(0.1);
  const double first = batch_loss(loss, logits, batch).item();
  batch.other_labels = Tensor::of(*backend, {2}, {0, 2}, DType::i32);
  batch.share = 0.7;
  const double second = loss(logits, batch.other_labels, nullptr).item();
  Tensor correct = Tensor::zeros(*backend, {1}, DType::i32);
  EXPECT_NEAR(batch_loss(loss, logits, batch, &correct).item(), 0.7 * first + 0.3 * second, 1e-6);
  EXPECT_EQ(correct.item(), 0) << "counted once, against the larger share's label";
}

// ---- checkpoints ----------------------------------------------------------------------------------------------------
struct Recipe {
  DType dtype = DType::f32;
  std::string optimizer = "sgd";
  double ema = 0.9, mixup = 0.4;
  int accumulate = 1;
  int epochs = 13;  // of 24 batches: 312 steps
  BackendKind on = backends()[0];
};

struct Checkpoint : testing::Test {
  const BackendKind kind = backends()[0], one_thread{kind.name, [this](int) { return kind.make_with(1); }};
  TemporaryFolder folder;
  Dataset data = pictures();
  std::function<void(Batch&)> at_evaluation = {};
  std::string last(const std::string& name) { return folder.file(name) + "/last.safetensors"; }

  // A run of its own, with everything made anew, as another process would.
  FitReport run(const Recipe& r, RunConfig options, Numbers* out = nullptr,
                std::function<void(Batch&)> transform = {}) {
    std::unique_ptr<Backend> backend = r.on.make();
    backend->deterministic(true);
    Loader train(data.train,
                 {.batch = 16,
                  .dtype = r.dtype,
                  .augment = {.pad_crop = 1, .flip = true, .cutout = 3},
                  .mixup = r.mixup,
                  .seed = options.seed,
                  .transform = std::move(transform)},
                 *backend);
    Loader held(data.test, {.batch = 10, .dtype = r.dtype, .shuffle = false, .transform = at_evaluation}, *backend);
    Small model;
    const auto optimizer =
        make_optimizer({.learning_rate = r.optimizer == "adamw" ? 0.003 : 0.05, .optimizer = r.optimizer, .clip = 5});
    options.progress = false;
    options.epochs = r.epochs;
    options.ema = r.ema;
    options.accumulate = r.accumulate;
    options.schedule = "one-cycle";
    FitReport report = fit(model, cross_entropy_loss(0.1), *optimizer, *backend, {train, &held}, options);
    if (out) *out = weights_of(model);
    return report;
  }

  // Goes on where the run of these options left its checkpoint.
  FitReport resume(RunConfig options, std::int64_t stop_after, Numbers* out = nullptr) {
    options.resume = options.checkpoint;
    options.stop_after = stop_after;
    return run({}, options, out);
  }

  // A run that ended early and left its checkpoint in run/; returns what it was asked for.
  RunConfig stopped_after(std::int64_t steps, Settings settings = {}) {
    RunConfig options{.checkpoint = folder.file("run"), .stop_after = steps, .settings = std::move(settings)};
    run({}, options);
    return options;
  }
};

std::ptrdiff_t files_in(const std::string& folder) {
  return std::distance(std::filesystem::directory_iterator(folder), {});
}

void expect_same(const EpochReport& a, const EpochReport& b) {
  const auto numbers = [](const EpochReport& e) {
    return Numbers{double(e.epoch), e.train_loss,       *e.train_accuracy,
                   e.learning_rate, *e.validation_loss, *e.validation_accuracy};
  };
  EXPECT_EQ(numbers(a), numbers(b));
}

TEST_F(Checkpoint, ResumingGivesTheUninterruptedRunBitForBit) {
  std::vector<std::pair<std::string, Recipe>> recipes{{"sgd", {}},
                                                      {"bf16", {.dtype = DType::bf16}},
                                                      {"adamw", {.optimizer = "adamw"}},
                                                      {"lars", {.optimizer = "lars", .ema = 0}},
                                                      {"accumulate", {.mixup = 0, .accumulate = 2, .epochs = 25}}};
  for (const BackendKind& many : backends()) {
    if (many.name == "reference") continue;  // the same code, many times slower
    for (auto [name, recipe] : recipes) {
      if (!many.make()->supports(recipe.dtype)) continue;
      const bool alone = name != "sgd";  // one recipe on several threads is enough
      recipe.on = {many.name, [&](int threads) { return many.make_with(alone ? 1 : threads); }};
      const std::string run_folder = folder.file(many.name + name), parts_folder = run_folder + " in parts";
      SCOPED_TRACE(many.name + " " + name);
      Numbers whole, parts;
      FitReport one = run(recipe, {.checkpoint = run_folder, .stop_after = 300}, &whole);
      ASSERT_EQ(one.steps, 300);
      ASSERT_TRUE(one.stopped);

      // 100 steps end in the middle of an epoch, 120 and 240 with one; the rest goes on in the same folder.
      RunConfig in_parts{.checkpoint = parts_folder};
      std::vector<EpochReport> epochs;
      for (std::int64_t stop : {100, 120, 240, 241, 300}) {
        in_parts.stop_after = stop;
        FitReport part = run(recipe, in_parts, &parts);
        EXPECT_EQ(part.steps, stop);
        EXPECT_TRUE(part.differences.empty()) << part.differences[0];
        epochs.insert(epochs.end(), part.epochs.begin(), part.epochs.end());
        in_parts.resume = parts_folder;
        in_parts.checkpoint = {};
      }
      EXPECT_EQ(parts, whole);
      ASSERT_EQ(epochs.size(), one.epochs.size());
      for (std::size_t i = 0; i < epochs.size(); i++) expect_same(epochs[i], one.epochs[i]);
      // Not only the model: optimizer, averages, sums of the running epoch, counters.
      EXPECT_TRUE(contents(run_folder + "/last.safetensors") == contents(parts_folder + "/last.safetensors"))
          << "the checkpoints differ";
    }
  }
}

TEST_F(Checkpoint, IsWrittenOnSigtermAndEveryEpoch) {
  const Recipe recipe{.epochs = 2};
  RunConfig options{.checkpoint = folder.file("straight")};
  Numbers whole, parts;
  run(recipe, options, &whole);
  EXPECT_TRUE(std::filesystem::exists(last("straight")));
  EXPECT_TRUE(std::filesystem::exists(folder.file("straight") + "/best.safetensors"));

  options.checkpoint = folder.file("stopped");
  FitReport stopped = run(recipe, options, nullptr, [sent = false](Batch& b) mutable {
    if (b.epoch == 1 && b.index == 9 && !std::exchange(sent, true)) std::raise(SIGTERM);
  });
  EXPECT_TRUE(stopped.stopped);
  EXPECT_GT(stopped.steps, 24);
  EXPECT_LT(stopped.steps, 48);
  options.resume = options.checkpoint;
  options.checkpoint = {};
  FitReport rest = run(recipe, options, &parts);
  EXPECT_EQ(rest.steps, 48);
  EXPECT_EQ(parts, whole);

  // The run is finished: no step is left, and the weights are loaded
  FitReport nothing = run(recipe, options, &parts);
  EXPECT_TRUE(nothing.epochs.empty());
  EXPECT_EQ(parts, whole);
}

TEST_F(Checkpoint, NamesWhatDiffers) {
  RunConfig options = stopped_after(5, {{"--model", "small"}, {"--data", ""}});
  options.resume = last("run");
  options.checkpoint = {};
  options.stop_after = 6;
  options.seed = 2;
  options.settings = {{"--model", "large"}, {"--data", "elsewhere"}};
  FitReport report = run({.ema = 0.5}, options);
  std::string all;
  for (const std::string& d : report.differences) all += d + "\n";
  EXPECT_EQ(all,
            "--data was not given and is elsewhere\n--ema was 0.9 and is 0.5\n--model was small and is large\n"
            "--seed was 1 and is 2\n");

  options.seed = 1;
  options.settings = {{"--model", "small"}};
  report = run({.on = one_thread}, options);
  ASSERT_FALSE(report.differences.empty());
  EXPECT_EQ(report.differences.back(), "threads was 2 and is 1");
}

TEST_F(Checkpoint, OfAnotherModelOrOptimizerIsRefusedAndChangesNothing) {
  stopped_after(5, {{"--model", "small"}});

  std::unique_ptr<Backend> backend = kind.make();
  Tiny other;
  FlatParameters flat(other, *backend, 7);
  BoundSgd sgd(flat, {.momentum = 0.9});
  const Numbers before = flat.values.values();
  EXPECT_REFUSED(load_checkpoint(last("run"), {flat, sgd}), last("run"), "another model", "it has no bn1.bias",
                 "--model small");
  EXPECT_REFUSED(load_weights(last("run"), flat), "another model");
  EXPECT_EQ(flat.values.values(), before);

  Small same;
  FlatParameters fits(same, *backend, 7);
  BoundSgd plain(fits, {.learning_rate = 0.1});
  EXPECT_REFUSED(load_checkpoint(last("run"), {fits, plain}), "optimizer/velocity", "--momentum");
  AdamW adamw({});
  adamw.bind(fits);
  EXPECT_REFUSED(load_checkpoint(last("run"), {fits, adamw}), "--optimizer sgd", "adamw");

  SafetensorsWriter weights_only;
  for (const ParameterRange& s : fits.parameter_ranges()) weights_only.add(s.name, s.leaf->value);
  weights_only.write(folder.file("weights.safetensors"));
  EXPECT_REFUSED(load_checkpoint(folder.file("weights.safetensors"), {fits, plain}), "not a checkpoint");

  load_weights(last("run"), fits);  // for using the model: its average
  SafetensorsFile file(last("run"));
  EXPECT_EQ(fits.parameter_range("fc.weight").leaf->value.values(), file.values("average/fc.weight"));
  EXPECT_NE(file.values("fc.weight"), file.values("average/fc.weight"));
}

TEST_F(Checkpoint, DamageIsNoticed) {
  stopped_after(3);
  const std::string good = contents(last("run"));
  std::unique_ptr<Backend> backend = kind.make();
  Small model;
  FlatParameters flat(model, *backend, 7);
  BoundSgd sgd(flat, {.momentum = 0.9});
  const std::string path = folder.file("damaged.safetensors");
  auto load = [&](const std::string& bytes) {
    std::ofstream(path, std::ios::binary) << bytes;
    return refused([&] { load_checkpoint(path, {flat, sgd}); }, {path});
  };
  const Numbers before = flat.values.values();
  const std::size_t header = 8 + std::size_t(*reinterpret_cast<const std::uint64_t*>(good.data()));
  for (std::size_t cut : {std::size_t{0}, std::size_t{7}, header / 2, header, good.size() / 2, good.size() - 1})
    EXPECT_TRUE(load(good.substr(0, cut))) << cut;
  EXPECT_TRUE(load(good + "x"));
  for (int i = 0; i < 300; i++) {
    std::string bad = good;
    std::size_t bit = std::size_t(Philox(i, Stream::test).word(0)) % (8 * (i % 2 ? header : good.size()));
    bad[bit / 8] = char(bad[bit / 8] ^ 1 << bit % 8);
    if (bit / 8 < header && std::isspace(static_cast<unsigned char>(good[bit / 8]))) continue;  // padding
    EXPECT_TRUE(load(bad)) << "bit " << bit;
  }
  EXPECT_EQ(flat.values.values(), before) << "and nothing was changed on the way";
  std::ofstream(path, std::ios::binary) << good;
  EXPECT_EQ(load_checkpoint(path, {flat, sgd}).step, 3);
}

// A full disk, as far as a process can have its own: a file may not grow beyond a limit.
TEST_F(Checkpoint, AFullDiskLeavesTheEarlierOne) {
  const RunConfig options = stopped_after(3);
  const std::string before = contents(last("run"));
  {
    const FileLimit full(before.size() / 2);
    EXPECT_REFUSED(resume(options, 5), last("run"), "unchanged");
  }
  EXPECT_TRUE(contents(last("run")) == before);
  EXPECT_EQ(files_in(folder.file("run")), 1) << "no half-written file is left";
}

TEST_F(Checkpoint, FoldersAreLookedAtBeforeTraining) {
  RunConfig options{.checkpoint = folder.file("run"), .stop_after = 1};
  run({}, options);
  const std::string before = contents(last("run"));
  EXPECT_REFUSED(run({}, options), "another run's", "--resume") << "nothing is overwritten";
  EXPECT_TRUE(contents(last("run")) == before);
  options.resume = folder.file("nowhere");
  EXPECT_REFUSED(run({}, options), "--resume", "nowhere");
  options = {};
  std::ofstream(folder.file("file")) << "x";
  options.checkpoint = folder.file("file") + "/below";
  EXPECT_REFUSED(run({}, options), "--checkpoint", "cannot be written");
}

TEST_F(Checkpoint, MetricsGoOnInTheSameFile) {
  RunConfig options{.metrics = folder.file("metrics.jsonl"), .checkpoint = folder.file("run"), .stop_after = 30};
  run({.epochs = 2}, options);
  std::ofstream(options.metrics, std::ios::app) << "{\"event\":\"ep";  // killed while it wrote
  options.resume = options.checkpoint;
  options.stop_after = 0;
  run({.epochs = 2}, options);
  std::string events;
  const std::vector<nlohmann::json> lines = lines_of(options.metrics);
  for (const nlohmann::json& j : lines) events += (j.is_discarded() ? "?" : j["event"].get<std::string>()) + " ";
  EXPECT_EQ(events, "start epoch end ? resume epoch end ");
  EXPECT_EQ(lines.back()["epochs"], 2) << "of the run, not of this process";
}

TEST_F(Checkpoint, MetricsOfAnotherRunAreNotGoneOnWith) {
  RunConfig options = stopped_after(30), other;
  other.metrics = folder.file("other.jsonl");
  other.seed = 2;
  other.stop_after = 2;
  run({}, other);
  const std::string before = contents(other.metrics);
  options.metrics = other.metrics;
  EXPECT_REFUSED(resume(options, 31), "--metrics " + other.metrics, "another run", "a new one");
  EXPECT_EQ(contents(other.metrics), before);
  options.metrics = folder.file("new.jsonl");  // which the third part then goes on with
  resume(options, 31);
  options.seed = 3;  // is said, and is still the run that was begun
  EXPECT_EQ(resume(options, 32).steps, 32);
}

TEST_F(Checkpoint, NothingLeftToDoDoesNothing) {
  RunConfig options = stopped_after(30);
  const std::string before = contents(last("run"));
  Numbers there, then;
  options.resume = options.checkpoint;
  run({}, options, &there);
  for (std::int64_t stop : {29, 30}) {  // 24 are an epoch
    options.stop_after = stop;
    options.checkpoint = folder.file("elsewhere");
    FitReport none;
    EXPECT_EQ(stderr_of([&] { none = run({}, options, &then); }), "");
    EXPECT_EQ(none.steps, 30);
    EXPECT_TRUE(none.stopped && none.epochs.empty());
    EXPECT_EQ(then, there);
  }
  options.stop_after = 0;
  EXPECT_EQ(run({.epochs = 1}, options).steps, 30);  // behind its last epoch
  EXPECT_FALSE(std::filesystem::exists(folder.file("elsewhere"))) << "a folder in which nothing is written";
  EXPECT_TRUE(contents(last("run")) == before);
}

TEST_F(Checkpoint, AFolderBelongsToOneRunAtATime) {
  RunConfig first{.checkpoint = folder.file("run"), .stop_after = 2};
  testing::AssertionResult said = testing::AssertionFailure() << "no second run was tried";
  run({}, first, nullptr, [&, made = 0](Batch&) mutable {
    if (made++ != 1) return;  // while it trains: fit() looks at the first batch before that
    said = refused([&] { run({}, first); },
                   {"--checkpoint " + first.checkpoint, "another run (process " + std::to_string(getpid()) + ")"});
  });
  EXPECT_TRUE(said);
  EXPECT_EQ(files_in(first.checkpoint), 1) << "the lock leaves nothing behind";
  EXPECT_EQ(resume(first, 3).steps, 3) << "and ends with its run";

  std::filesystem::rename(last("run"), first.checkpoint + "/best.safetensors");
  EXPECT_REFUSED(run({}, first), "another run's best.safetensors");
  std::ofstream(folder.file("file")) << "x";
  first.checkpoint = folder.file("file");
  EXPECT_REFUSED(run({}, first), "is a file, not a folder");
}

TEST_F(Checkpoint, TheLastGoodOneStaysWhenAValueIsNotFinite) {
  auto spoil = [](Batch& b) {
    if (b.epoch == 1 && b.index == 3) b.images = Tensor::full(b.images.backend(), b.images.shape(), NAN);
  };
  RunConfig options{.checkpoint = folder.file("run")};
  EXPECT_REFUSED(run({}, options, nullptr, spoil), "step 28 ", last("run") + " holds the run after step 24");
  options.resume = options.checkpoint;
  EXPECT_REFUSED(run({}, options, nullptr, spoil), "step 28 ", last("run") + " is as it was");
  EXPECT_EQ(resume(options, 25).steps, 25);
  EXPECT_REFUSED(run({}, {}, nullptr, spoil), "no checkpoint without --checkpoint");
}

// A signal that comes while pictures are evaluated does not wait for the next step; the rest is the same bit for bit.
TEST_F(Checkpoint, ASignalEndsAnEvaluation) {
  Numbers whole, parts;
  const Recipe recipe{.epochs = 2, .on = one_thread};
  RunConfig options{.checkpoint = folder.file("straight")};
  FitReport straight = run(recipe, options, &whole);
  options.checkpoint = folder.file("run");
  std::atomic<int> made = 0;
  at_evaluation = [&](Batch&) {
    if (made++ == 0) std::raise(SIGTERM);
  };
  FitReport stopped = run(recipe, options);
  EXPECT_LT(made, 6) << "of 10 batches; two are made ahead";
  EXPECT_TRUE(stopped.stopped);
  EXPECT_EQ(stopped.steps, 24);
  EXPECT_TRUE(stopped.epochs.empty()) << "half an evaluation was reported";
  EXPECT_EQ(stopping_signal(), SIGTERM);
  at_evaluation = {};
  options.resume = options.checkpoint;
  FitReport rest = run(recipe, options, &parts);
  EXPECT_EQ(rest.steps, 48);
  EXPECT_EQ(parts, whole);
  ASSERT_EQ(rest.epochs.size(), 2u);
  for (int i : {0, 1}) expect_same(rest.epochs[i], straight.epochs[i]);
}

// ---- early stop -----------------------------------------------------------------------------------------------------
TEST_F(Runs, StopWhenValidationNoLongerImproves) {
  Dataset data = pictures(64, 50);
  Loader train(data.train, {.batch = 16, .seed = 1}, *backend),
      held(data.test, {.batch = 50, .shuffle = false}, *backend);
  Plain model;
  SGD still({.learning_rate = 0});  // nothing changes: the first epoch stays the best
  RunConfig options{.epochs = 10, .progress = false, .patience = 3};
  auto fits = [&](SGD& sgd) { return fit(model, cross_entropy_loss(), sgd, *backend, {train, &held}, options); };
  FitReport report = fits(still);
  EXPECT_EQ(report.epochs.size(), 4u);
  EXPECT_TRUE(report.stopped);
  EXPECT_EQ(report.best_epoch, 1);

  // So ended, it stays ended, whether it is asked to be patient again or not; a larger patience goes on.
  TemporaryFolder folder;
  options.checkpoint = folder.file("run");
  fits(still);
  const std::string ended = contents(options.checkpoint + "/last.safetensors");
  options.resume = options.checkpoint;
  for (int patience : {3, 2, 0}) {
    options.patience = patience;
    report = fits(still);
    EXPECT_TRUE(report.stopped && report.epochs.empty()) << patience;
    EXPECT_TRUE(contents(options.checkpoint + "/last.safetensors") == ended);
  }
  options.patience = 5;
  EXPECT_EQ(fits(still).epochs.size(), 2u);
  options = {.epochs = 10, .progress = false, .patience = 3};
  SGD learns({.learning_rate = 0.02, .momentum = 0.9});
  report = fits(learns);
  for (const EpochReport& e : report.epochs)
    EXPECT_LE(*e.validation_accuracy, *report.epochs[report.best_epoch - 1].validation_accuracy);
  EXPECT_REFUSED(fit(model, cross_entropy_loss(), learns, *backend, {train}, options), "--patience", "--val");
}

}  // namespace
}  // namespace tandem::test
