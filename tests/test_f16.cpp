// f16 and dynamic loss scaling: the type, the policy, and training with it.
#include "core/step.h"
#include "tests/training.h"

namespace tandem::test {
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
  auto expect = [&](bool finite, const std::vector<float>& scales) {
    for (float want : scales) EXPECT_EQ(step(finite), want) << log;
  };
  expect(true, {8, 8, 16, 16, 16, 16});  // no larger than the most
  expect(false, {8});
  expect(true, {8, 8});
  expect(false, {4});  // and the count of good steps begins anew
  expect(true, {4, 4, 8});
  expect(false, {4, 2, 1});
  step(false);  // at scale 1 it is the gradient's own fault
  step(true);   // and stays so
  EXPECT_EQ(log, "aaaaaasaasaaasssXX");
  StepState plain;
  EXPECT_FALSE(check_step(plain, false, false, scaling));
  EXPECT_EQ(plain.not_finite, 1) << "without scaling the first one stops";
}

struct Training {
  std::string optimizer = "sgd";
  double rate = 0.05, clip = 0;
  RunConfig fit = {.epochs = 2, .progress = false};
};
// The weights after it, and the optimizer's state.
std::pair<Numbers, StepState> trained(const std::optional<LossScaling>& scaling, const Training& t = {}) {
  auto backend = reference_backend(1);
  Dataset data = synthetic({.side = 4, .channels = 1, .train = 96, .test = 20});
  Loader loader(data.train, {.batch = 16, .seed = 3, .prefetch = 0}, *backend);
  auto model = make_model("smallcnn", 10, 1, 4);
  auto optimizer = make_optimizer({.learning_rate = t.rate, .optimizer = t.optimizer});
  optimizer->loss_scaling = scaling;
  optimizer->clip_norm = t.clip;
  fit(*model, cross_entropy_loss(), *optimizer, *backend, {loader}, t.fit);
  return {weights_of(*model), optimizer->read_state()};
}

TEST(LossScaling, APowerOfTwoChangesNoBitOfTheTraining) {
  for (double clip : {0.0, 0.5})
    EXPECT_EQ(trained(LossScaling{.first = 1024, .patience = 5}, {.clip = clip}).first,
              trained({}, {.clip = clip}).first);
  // But steps that overflow are skipped until the scale fits
  const auto [w, state] = trained(LossScaling{.first = 0x1p127f, .most = 0x1p127f});
  EXPECT_LT(state.step, 12u) << "of twelve steps some overflowed f32";
  for (double v : w) ASSERT_TRUE(std::isfinite(v));
  EXPECT_NE(w, trained({}).first);
}

// Overflows, skipped steps and a scale that grows again lie before and behind the place where the run is cut.
TEST(LossScaling, AResumedRunGivesTheBitsOfTheUninterruptedOne) {
  TemporaryFolder folder;
  for (const char* name : {"sgd", "adamw"})
    for (std::optional<LossScaling> scaling :
         {std::optional(LossScaling{.first = 0x1p127f, .most = 0x1p127f, .patience = 2}), {}}) {
      const std::string place = folder.file(std::string(name) + (scaling ? " scaled" : ""));
      Training whole{.optimizer = name, .rate = 0.01, .fit = {.epochs = 4, .progress = false}};
      Training first = whole, rest = whole;
      first.fit.stop_after = 9, first.fit.checkpoint = rest.fit.resume = place;
      const auto [straight, end] = trained(scaling, whole);
      trained(scaling, first);
      const auto [parts, again] = trained(scaling, rest);
      EXPECT_EQ(straight, parts) << name;
      EXPECT_EQ(std::tuple(end.loss_scale, end.unscaled_steps, end.step, end.skipped),
                std::tuple(again.loss_scale, again.unscaled_steps, again.step, again.skipped));
      EXPECT_EQ(end.step + end.skipped, 24u);
      EXPECT_EQ(end.skipped > 0, scaling.has_value());
    }
}

TEST(LossScaling, ACheckpointWithoutAScaleIsReadAsBefore) {
  TemporaryFolder folder;
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
}  // namespace tandem::test
