// f16 and dynamic loss scaling: the type, the policy, and training with it.
#include <gtest/gtest.h>

#include <cmath>

#include "core/step.h"
#include "datasets/loader.h"
#include "datasets/synthetic.h"
#include "layers/models/models.h"
#include "layers/train/checkpoint.h"
#include "layers/train/fit.h"
#include "layers/train/options.h"
#include "tests/support.h"

using namespace tandem;

namespace {

TEST(F16, EveryNumberOfItComesBackAndRoundingIsToTheNearest) {
  for (std::uint32_t bits = 0; bits < 65536; bits++) {
    f16 h;
    h.bits = std::uint16_t(bits);
    const float v = h;
    if (v != v) {
      EXPECT_NE(float(f16(v)), float(f16(v)));
      continue;
    }
    EXPECT_EQ(f16(v).bits, bits);
    const int exponent = int(bits >> 10 & 31), fraction = int(bits & 1023);
    const double want = exponent == 31  ? INFINITY
                        : exponent == 0 ? std::ldexp(fraction, -24)
                                        : std::ldexp(1024 + fraction, exponent - 25);
    EXPECT_EQ(v, bits & 0x8000 ? -want : want) << bits;
    if (exponent == 31 || bits >= 0x8000) continue;
    f16 next;
    next.bits = std::uint16_t(bits + 1);  // halfway to it: to the even one, and a little beside: to the nearer one
    const double half = exponent == 30 && fraction == 1023 ? 65520 : (double(v) + double(float(next))) / 2;
    EXPECT_EQ(f16(float(half)).bits, bits + (bits & 1)) << bits;
    EXPECT_EQ(f16(std::nextafter(float(half), 0.f)).bits, bits);
    EXPECT_EQ(f16(std::nextafter(float(half), INFINITY)).bits, bits + 1);
  }
}

TEST(LossScaling, HalvesAtAnOverflowAndDoublesAfterPatience) {
  const LossScaling scaling{.first = 8, .most = 16, .patience = 3};
  StepState s;
  s.loss_scale = scaling.first;
  std::string log;
  auto step = [&](bool finite) {
    log += check_step(s, finite, true, scaling) ? 'a' : s.not_finite == 2 ? 's' : 'X';
    return s.loss_scale;
  };
  EXPECT_EQ(step(true), 8);
  EXPECT_EQ(step(true), 8);
  EXPECT_EQ(step(true), 16);
  for (int i = 0; i < 3; i++) EXPECT_EQ(step(true), 16) << "no larger than the most";
  EXPECT_EQ(step(false), 8);
  EXPECT_EQ(step(true), 8);
  EXPECT_EQ(step(true), 8);
  EXPECT_EQ(step(false), 4) << "and the count of good steps begins anew";
  EXPECT_EQ(step(true), 4);
  EXPECT_EQ(step(true), 4);
  EXPECT_EQ(step(true), 8);
  for (float want : {4.f, 2.f, 1.f}) EXPECT_EQ(step(false), want);
  step(false);  // at scale 1 it is the gradient's own fault
  step(true);   // and stays so
  EXPECT_EQ(log, "aaaaaasaasaaasssXX");
  StepState plain;
  EXPECT_FALSE(check_step(plain, false, false, scaling));
  EXPECT_EQ(plain.not_finite, 1) << "without scaling the first one stops";
}

std::vector<double> trained(std::optional<LossScaling> scaling, double clip, std::uint64_t* steps = nullptr) {
  auto backend = reference_backend(1);
  Dataset data = synthetic({.side = 28, .train = 96, .test = 20});
  Loader loader(data.train, {.batch = 16, .seed = 3, .prefetch = 0}, *backend);
  auto model = make_model("lenet5", 10, 1, 28);
  SGD sgd({.learning_rate = 0.05, .momentum = 0.9});
  sgd.loss_scaling = scaling;
  sgd.clip_norm = clip;
  fit(*model, cross_entropy_loss(), sgd, *backend, {loader}, {.epochs = 2, .progress = false});
  if (steps) *steps = sgd.read_state().step;
  std::vector<double> all;
  for (auto& [name, p] : model->parameters())
    for (double v : p->variable.value().values()) all.push_back(v);
  return all;
}

TEST(LossScaling, APowerOfTwoChangesNoBitOfTheTraining) {
  for (double clip : {0.0, 0.5}) EXPECT_EQ(trained(LossScaling{.first = 1024, .patience = 5}, clip), trained({}, clip));
}

TEST(LossScaling, StepsThatOverflowAreSkippedUntilTheScaleFits) {
  std::uint64_t steps = 0;
  const std::vector<double> w = trained(LossScaling{.first = 0x1p127f, .most = 0x1p127f}, 0, &steps);
  EXPECT_LT(steps, 12u) << "of twelve steps some overflowed f32";
  for (double v : w) ASSERT_TRUE(std::isfinite(v));
  EXPECT_NE(w, trained({}, 0));
}

// Overflows, skipped steps and a scale that grows again lie before and behind the place where the run is cut.
TEST(LossScaling, AResumedRunGivesTheBitsOfTheUninterruptedOne) {
  test::TemporaryFolder folder;
  for (const char* name : {"sgd", "adamw"})
    for (std::optional<LossScaling> scaling :
         {std::optional(LossScaling{.first = 0x1p127f, .most = 0x1p127f, .patience = 2}), {}}) {
      const std::string place = folder.file(std::string(name) + (scaling ? " scaled" : ""));
      auto run = [&](int stop_after, bool resumes, bool saves) {
        auto backend = reference_backend(1);
        Dataset data = synthetic({.side = 28, .train = 96, .test = 20});
        Loader loader(data.train, {.batch = 16, .seed = 3, .prefetch = 0}, *backend);
        auto model = make_model("lenet5", 10, 1, 28);
        auto optimizer = make_optimizer({.learning_rate = 0.01, .optimizer = name});
        optimizer->loss_scaling = scaling;
        RunConfig options{.epochs = 4, .progress = false};
        options.stop_after = stop_after;
        if (saves) options.checkpoint = place;
        if (resumes) options.resume = place;
        fit(*model, cross_entropy_loss(), *optimizer, *backend, {loader}, options);
        std::vector<double> all;
        for (auto& [path, p] : model->parameters())
          for (double v : p->variable.value().values()) all.push_back(v);
        return std::pair(all, optimizer->read_state());
      };
      const auto [straight, end] = run(0, false, false);
      run(9, false, true);
      const auto [parts, again] = run(0, true, false);
      EXPECT_EQ(straight, parts) << name;
      EXPECT_EQ(end.loss_scale, again.loss_scale);
      EXPECT_EQ(end.unscaled_steps, again.unscaled_steps);
      EXPECT_EQ(end.step, again.step);
      EXPECT_EQ(end.skipped, again.skipped);
      EXPECT_EQ(end.step + end.skipped, 24u);
      EXPECT_EQ(end.skipped > 0, scaling.has_value());
    }
}

TEST(LossScaling, ACheckpointWithoutAScaleIsReadAsBefore) {
  test::TemporaryFolder folder;
  auto backend = reference_backend(1);
  auto model = make_model("lenet5", 10, 1, 28);
  FlatParameters flat(*model, *backend, 1);
  SGD plain({.momentum = 0.9}), scaled({.momentum = 0.9});
  scaled.loss_scaling = LossScaling{.first = 512};
  plain.bind(flat), scaled.bind(flat);
  RunPosition at;
  at.step = 7;
  const std::string file = folder.file("older.safetensors");
  save_checkpoint(file, {flat, plain}, at);
  load_checkpoint(file, {flat, scaled});
  EXPECT_EQ(scaled.read_state().loss_scale, 512) << "it begins anew";
  EXPECT_EQ(scaled.read_state().step, 7u);
  save_checkpoint(file, {flat, scaled}, at);
  load_checkpoint(file, {flat, plain});
  EXPECT_EQ(plain.read_state().loss_scale, 1) << "which has no use for it";
}

}  // namespace
