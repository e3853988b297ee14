// The pieces of airbench94's recipe (examples/airbench.h), each against what the recipe says in words.
#include "examples/airbench.h"

#include "datasets/synthetic.h"
#include "tests/support.h"

namespace tandem::test {
namespace {
using namespace tandem::airbench;

Pictures some(std::int64_t count) { return synthetic({.side = 32, .channels = 3, .train = count, .test = 16}).train; }

struct Airbench : OnReference {
  Net model;
  FlatParameters flat{model, *backend, 1};
};

TEST_F(Airbench, WhitenedPatchesAreUncorrelated) {
  const Pictures pictures = some(40);
  const Numbers filters = whitening(pictures);
  ASSERT_EQ(filters.size(), 24u * patch);
  const LoaderOptions plain{.batch = 40, .shuffle = false, .prefetch = 0};
  Loader loader(pictures, plain, *backend);
  const Batch batch = loader.make(0, 0);
  const Variable y = conv2d(Variable(batch.images), Variable(Tensor::of(*backend, {24, 2, 2, 3}, filters)), Variable());
  const Numbers v = y.value().values();
  const std::size_t rows = v.size() / 24;
  double largest = 0;
  for (std::size_t a = 0; a < 12; a++)
    for (std::size_t b = 0; b <= a; b++) {
      double sum = 0;
      for (std::size_t r = 0; r < rows; r++) sum += v[r * 24 + a] * v[r * 24 + b];
      sum /= double(rows);
      EXPECT_LE(sum, 1 + 1e-4);
      if (a == b)
        largest = std::max(largest, sum);  // λ / (λ + ε)
      else
        EXPECT_NEAR(sum, 0, 1e-3) << a << " and " << b;
    }
  EXPECT_GT(largest, 0.99);
  for (std::size_t r = 0; r < rows; r += 97)
    for (std::size_t k = 0; k < 12; k++) ASSERT_NEAR(v[r * 24 + k], -v[r * 24 + 12 + k], 1e-4) << "the same, negated";
}

TEST_F(Airbench, FiltersLetThroughAsManyChannelsAsThereAre) {
  const Numbers drawn = flat.parameter_range("group1.conv1.weight").leaf->value.values();
  let_through(flat);
  const Variable x(Tensor::of(*backend, {1, 5, 5, 24}, numbers("x", 600)));
  const Numbers y = model.group1.conv1(x).value().values(), in = x.value().values();
  for (std::size_t p = 0; p < 25; p++)
    for (std::size_t c = 0; c < 24; c++) ASSERT_EQ(y[p * 64 + c], in[p * 24 + c]);
  const Numbers w = flat.parameter_range("group1.conv1.weight").leaf->value.values();
  for (std::size_t i = 24 * 216; i < w.size(); i++) ASSERT_EQ(w[i], drawn[i]) << "the others stay as they were drawn";
}

TEST_F(Airbench, WhatLearnsAndHowFast) {
  constexpr double rate = 0.01, decay = 0.1;
  Descent descent(rate, 0, decay);
  descent.bind(flat, 1);
  auto step = [&] {
    const Numbers before = flat.values.values();
    flat.gradients.fill(1);
    descent.measure(flat.all(), false);
    descent.check_gradients(nullptr);
    descent.apply(flat.all());
    return before;
  };
  auto moved = [&](const Numbers& before, const std::string& name) {
    const ParameterRange& s = flat.parameter_range(name);
    const double w = before[s.local_begin];
    return std::pair(w - s.leaf->value.values()[0], w);
  };
  const Numbers first = step();
  EXPECT_EQ(moved(first, "whiten.weight").first, 0);
  EXPECT_EQ(moved(first, "group2.norm1.weight").first, 0);
  auto [filter, w] = moved(first, "group2.conv2.weight");
  EXPECT_NEAR(filter, rate * (1 + decay * w), 1e-6);
  const ParameterRange& bias = flat.parameter_range("group2.norm1.bias");
  bias.leaf->value.fill(0.5);
  auto [fast, b] = moved(step(), "group2.norm1.bias");
  EXPECT_NEAR(fast, rate * (64 + decay * b), 1e-5) << "64 times as fast, and decays like the others";
  EXPECT_NE(moved(first, "whiten.bias").first, 0);
  descent.freeze(flat.parameter_range("whiten.bias"));
  const Numbers later = step();
  EXPECT_EQ(moved(later, "whiten.bias").first, 0);
  EXPECT_NE(moved(later, "group1.conv1.weight").first, 0) << "its neighbours go on";
}

TEST_F(Airbench, RatesRiseAndFall) {
  EXPECT_DOUBLE_EQ(triangle(0), 0.2);
  EXPECT_DOUBLE_EQ(triangle(0.23), 1);
  EXPECT_NEAR(triangle(1), 0.07, 1e-12);
  EXPECT_NEAR(triangle(0.115), 0.6, 1e-12);
  EXPECT_EQ(Lookahead::decay(0), 0);
  EXPECT_NEAR(Lookahead::decay(0.5), std::pow(0.95, 5) / 8, 1e-12);
  EXPECT_NEAR(learning_rate, 11.5 / (1 + 1 / (1 - momentum)), 1e-3);
  EXPECT_NEAR(weight_decay, 0.0153 / 11.5, 1e-6);
}

TEST_F(Airbench, LookaheadAveragesWeightsAndStatistics) {
  const Numbers w = flat.values.values(), s = flat.buffers.values();
  Lookahead lookahead(flat);
  flat.values.fill(2), flat.buffers.fill(3);
  lookahead.pull(0.25);
  const Numbers now = flat.values.values(), then = flat.buffers.values();
  for (std::size_t i = 0; i < w.size(); i++) ASSERT_NEAR(now[i], 0.25 * w[i] + 1.5, 1e-6);
  for (std::size_t i = 0; i < s.size(); i++) ASSERT_NEAR(then[i], 0.25 * s[i] + 2.25, 1e-6);
  flat.values.fill(9);
  lookahead.pull(1);
  EXPECT_EQ(flat.values.values(), now) << "the last word is the average's";
}

TEST_F(Airbench, ViewsAreMovedReflectedAndMirrored) {
  const Pictures p = some(3);
  auto at = [](const Pictures& q, int i, int y, int x, int c) {
    return int(q.images.data<std::uint8_t>()[((i * 32 + y) * 32 + x) * 3 + c]);
  };
  const Pictures up = view(p, -1, false), down = view(p, 1, true);
  for (int c = 0; c < 3; c++) {
    EXPECT_EQ(at(up, 1, 5, 9, c), at(p, 1, 4, 8, c));
    EXPECT_EQ(at(up, 1, 0, 9, c), at(p, 1, 1, 8, c)) << "behind the border lies its neighbour again";
    EXPECT_EQ(at(down, 2, 5, 9, c), at(p, 2, 6, 31 - 9 + 1, c));
    EXPECT_EQ(at(down, 2, 31, 0, c), at(p, 2, 30, 30, c));
  }
}

// A model that answers with the mean of one corner pixel's channels: each look's share of the verdict can be read off.
struct Corner : Module {
  Variable forward(const Variable& x) override {
    return cat(std::vector{reshape(slice(slice(slice(x, 1, 0, 1), 2, 0, 1), 3, 0, 1), {x.size(0), 1}),
                           Variable(Tensor::zeros(x.backend(), {x.size(0), 1}))},
               1);
  }
};

TEST_F(Airbench, TheVerdictIsOfSixLooks) {
  Pictures p = some(1);
  p.mean = {0, 0, 0}, p.std = {1, 1, 1}, p.classes = 2, p.class_names = {};
  // Corner of the picture, its mirror image, and the reflected corners that the moved ones show.
  auto set = [&](int y, int x, double v) { p.images.write<std::uint8_t>()[(y * 32 + x) * 3] = std::uint8_t(v); };
  auto right = [&](std::int32_t label) {
    p.labels.write<std::int32_t>()[0] = label;
    Corner model;
    return Looks(p, {.batch = 1, .shuffle = false, .prefetch = 0}, *backend).accuracy(model, *backend);
  };
  p.images.fill(0);
  EXPECT_EQ(right(0), 1) << "a tie goes to the first";
  for (auto [y, x] : {std::pair(0, 0), {0, 31}, {1, 1}, {1, 30}}) {
    p.images.fill(0);
    set(y, x, 200);
    EXPECT_EQ(right(0), 1);
    EXPECT_EQ(right(1), 0) << y << ", " << x << " is looked at";
  }
}

TEST_F(Airbench, ASmallRunLearns) {
  auto backend = cpu_backend(2);
  Pictures pictures = some(128);
  Net model;
  FlatParameters flat(model, *backend, 1);
  let_through(flat);
  const ParameterRange& whiten = flat.parameter_range("whiten.weight");
  whiten.leaf->value.copy_from(Tensor::of(*backend, whiten.shape, whitening(pictures)));
  Descent descent(0.5, momentum, weight_decay);
  descent.bind(flat, 1);
  Loader loader(pictures,
                {.batch = 64,
                 .augment = {.pad_crop = 2, .flip = true, .reflect = true, .alternate = true},
                 .seed = 1,
                 .prefetch = 0},
                *backend);
  double first = 0, last = 0;
  for (int epoch = 0; epoch < 3; epoch++) {
    loader.start(epoch);
    for (Batch batch; loader.next(batch);) {
      flat.zero_gradients();
      Variable l = cross_entropy(model(Variable(batch.images)), batch.labels, label_smoothing);
      flat.backward(l);
      descent.step(&l.value());
      if (first == 0) first = l.item();
      last = l.item();
    }
  }
  EXPECT_LT(last, 0.8 * first);
}

}  // namespace
}  // namespace tandem::test
