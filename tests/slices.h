// What layers that are cut over ranks are tried with: whole vectors, an epoch of training, and what both must be.
#pragma once
#include <gtest/gtest.h>

#include <fstream>
#include <string>
#include <vector>

#include "layers/train/slices.h"
#include "tests/replicas.h"

namespace tandem::test {

using Numbers = std::vector<double>;

// Whole vectors, in the order of the plain model's parameters.
inline Numbers whole(const FlatParameters& flat, const Tensor& vector, Strategy& strategy) {
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

inline std::unique_ptr<Optimizer> optimizer_called(const std::string& name) {
  if (name == "sgd")
    return std::make_unique<SGD>(SGDOptions{.learning_rate = 0.1, .momentum = 0.9, .weight_decay = 1e-3});
  if (name == "adamw") return std::make_unique<AdamW>(AdamWOptions{.learning_rate = 0.01});
  return std::make_unique<LARS>(LARSOptions{.learning_rate = 0.5});
}

// An epoch of five steps, of which the last has a smaller batch.
inline Seen trained_on(Strategy& strategy, Module& model, const Loss& task, Optimizer& optimizer, Backend& backend,
                       DType dtype, double clip_norm) {
  Seen seen;
  Dataset data = odd_number_of_pictures();
  Loader source(data.train, {.batch = 42, .seed = 5, .rank = strategy.rank(), .world = strategy.size(), .prefetch = 0},
                backend);
  FlatParameters flat(model, backend, 100, {}, dtype);
  optimizer.clip_norm = clip_norm;
  optimizer.bind(flat);
  strategy.begin(flat, optimizer);
  Accumulation accumulation(flat, optimizer, 1, source.batches_per_epoch());
  source.start(0);
  for (Batch batch; source.next(batch);) {
    accumulation.begin(batch);
    const Variable loss = task(model(Variable(batch.images.cast(dtype))), batch.labels, nullptr);
    accumulation.backward(loss, loss, batch);
    EXPECT_EQ(strategy.step(optimizer, Variable(accumulation.loss())), StepResult::made);
    const MetricSums sum = strategy.sum({.loss = loss.item() * double(batch.size()), .samples = double(batch.size())});
    seen.losses.push_back(sum.loss / sum.samples);
    seen.norms.push_back(optimizer.gradient_norm());
    if (seen.gradients.empty()) seen.gradients = whole(flat, flat.gradients, strategy);
  }
  strategy.end();
  seen.weights = whole(flat, flat.values, strategy);
  for (auto& [name, vector] : optimizer.vectors())
    for (double v : whole(flat, vector, strategy)) seen.state.push_back(v);
  return seen;
}

inline void same(const Seen& got, const Seen& want, double first, double last, const std::string& what) {
  EXPECT_EQ(got.losses.size(), 5u);
  EXPECT_TRUE(close(what + ": losses", got.losses, want.losses, last));
  EXPECT_TRUE(close(what + ": gradients of the first step", got.gradients, want.gradients, first));
  EXPECT_TRUE(close(what + ": norms", got.norms, want.norms, last));
  EXPECT_TRUE(close(what + ": weights", got.weights, want.weights, last));
  EXPECT_TRUE(close(what + ": the optimizer's", got.state, want.state, last));
}

inline std::string contents(const std::string& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

}  // namespace tandem::test
