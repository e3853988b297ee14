// The tuner: what it predicts of a minibatch that it has not run, what it chooses, and the learning rate that goes with
// it.
#include <nlohmann/json.hpp>

#include "tests/training.h"

namespace tandem::test {
namespace {

const Workload workload{.model = "resnet20", .side = 16};
const SimulatedRates rates{.flops = 2e10, .memory = 1e10, .out = 2e9, .in = 2e9};

struct Recorded {
  std::unique_ptr<Backend> backend = cpu_backend(1);
  RecordedStep small = record_step(workload, 8, *backend, simulated_mover(rates), 1),
               large = record_step(workload, 16, *backend, simulated_mover(rates), 1);
  std::size_t peak(std::int64_t batch) const {
    const IterationRecord r = at_batch(small, large, batch);
    return simulate(r, std::vector<Fate>(r.saved.size(), Fate::keep), std::size_t(1) << 50, {}).peak;
  }
};

TEST(Tuner, AMinibatchThatWasNotRunIsPredicted) {
  const Recorded r;
  const RecordedStep real = record_step(workload, 48, *r.backend, simulated_mover(rates), 1);
  const IterationRecord guess = at_batch(r.small, r.large, 48);
  ASSERT_EQ(guess.events.size(), real.record.events.size());
  ASSERT_EQ(guess.saved.size(), real.record.saved.size());
  double seconds = 0, predicted = 0, bytes = 0, guessed = 0;
  for (std::size_t i = 0; i < guess.events.size(); i++)
    seconds += real.record.events[i].seconds, predicted += guess.events[i].seconds;
  for (std::size_t i = 0; i < guess.saved.size(); i++)
    bytes += double(real.record.saved[i].bytes), guessed += double(guess.saved[i].bytes);
  EXPECT_NEAR(predicted / seconds, 1, 0.02);
  EXPECT_NEAR(guessed / bytes, 1, 0.05) << "blocks below 1 MiB are rounded up";
  EXPECT_REFUSED(at_batch(r.large, r.small, 48), "the smaller minibatch first");
}

// On the simulated device: a plan takes the time, and the memory, that was predicted without running it.
TEST(Tuner, APlanTakesTheTimeThatWasPredicted) {
  const Recorded r;
  TunerOptions o{.budget = r.peak(16), .batches = {8, 16, 24, 32}, .means = {.out = rates.out, .in = rates.in}};
  const auto rows = tune(r.small, r.large, o);
  ASSERT_EQ(rows.size(), 4u);
  EXPECT_EQ(rows[1].choice.forecast.swapped + rows[1].choice.forecast.recomputed, 0u) << "fits as it is";
  int moved = 0;
  for (const TunedBatch& row : rows) {
    if (!row.fits()) continue;
    moved += row.choice.forecast.swapped + row.choice.forecast.recomputed > 0;
    EXPECT_LE(row.choice.forecast.peak, o.budget);
    const double measured =
        measure_batch(workload, row.batch, *r.backend, simulated_mover(rates), {.budget = o.budget * 21 / 20}, 3);
    EXPECT_NEAR(measured / row.choice.forecast.seconds, 1, 0.15) << row.batch;
  }
  EXPECT_GT(moved, 0);
  EXPECT_EQ(largest_kept(r.small, r.large, o.budget), 16);
  o.multiples = {1, 2}, o.batches = {};
  const auto multiples = tune(r.small, r.large, o);
  EXPECT_TRUE(multiples.size() == 2 && multiples[0].batch == 16 && multiples[1].batch == 32);
  const TunedBatch& best = fastest(rows);
  for (const TunedBatch& row : rows)
    EXPECT_TRUE(!row.fits() || best.per_sample() <= 1.005 * row.per_sample()) << row.batch;
  EXPECT_EQ(part_of(rows[3], rows), &rows[1]) << "32 = 2 × 16, and 16 needs no plan";
  EXPECT_EQ(part_of(rows[2], rows), &rows[0]) << "16 does not divide 24";
  EXPECT_EQ(part_of(rows[0], rows), nullptr);
  TunedBatch slow = rows[1];
  slow.exposed += 1;
  EXPECT_NEAR(slow.per_sample(4), rows[1].per_sample(4) + 0.25 / 16, 1e-12) << "one exchange for four minibatches";
  slow.measured = 2 * slow.choice.forecast.seconds;
  EXPECT_GT(slow.per_sample(), slow.predicted_sample());
  EXPECT_EQ(fastest(rows, 8).batch, 8) << "the noise scale's cap";
  std::map<std::string, int> events;
  std::size_t swapped = 0;
  for (const TunedBatch& row : rows) {
    if (!row.fits()) continue;
    std::size_t event = 0;
    for (const MetricFields& fields : tuner_lines(rows, row, o.means)) {
      const nlohmann::json line = nlohmann::json::parse(json_object(fields));
      events[line["event"]] += &row == &best;
      if (!line.contains("rest")) continue;  // not of memory
      std::size_t parts = 0;
      for (const char* part : {"rest", "kept", "recomputed", "swapped"}) parts += line[part].get<std::size_t>();
      EXPECT_EQ(parts, row.choice.forecast.live[event++]) << "the parts add up";
      swapped += line["swapped"].get<std::size_t>();
    }
  }
  EXPECT_GT(swapped, 0u);
  EXPECT_EQ(events["minibatch"], 4);
  EXPECT_EQ(events["memory"], int(best.record.events.size()));
  EXPECT_TRUE(events["budget"] > 22 && events["budget"] <= 33) << events["budget"];
  o.budget = 1 << 20, o.multiples = {}, o.batches = {8};
  EXPECT_REFUSED(tune(r.small, r.large, o), "1.00 MiB", "too small", "a minibatch of 8 needs");
}

TEST(Tuner, ExchangeIsHiddenUnderBackward) {
  const ExchangeModel server{.ranks = 4, .link = 1e6}, ring{.ranks = 4, .link = 1e6, .server = false};
  EXPECT_DOUBLE_EQ(server.exposed(1e6, 10), 0.75);  // the answers
  EXPECT_DOUBLE_EQ(server.exposed(1e6, 0.25), 1.25);
  EXPECT_DOUBLE_EQ(ring.exposed(1e6, 10), 0);
  EXPECT_DOUBLE_EQ(ring.exposed(1e6, 1), 0.5);
  EXPECT_EQ(ExchangeModel{}.exposed(1e6, 0), 0);
}

TEST(Tuner, NoiseOfTheGradientAndTheLearningRate) {
  const auto norm = [](double b) { return 4 + 100 / b; };  // |G|² = 4, tr(Σ) = 100
  const GradientNoise n = gradient_noise(8, norm(8), 64, norm(64));
  EXPECT_NEAR(n.gradient, 4, 1e-12);
  EXPECT_NEAR(n.trace, 100, 1e-12);
  EXPECT_NEAR(n.scale(), 25, 1e-12);
  EXPECT_DOUBLE_EQ(matched_rate(RateRule::linear, 0.1, 4, 8, n), 0.4);
  EXPECT_DOUBLE_EQ(matched_rate(RateRule::square_root, 0.1, 4, 8, n), 0.2);
  EXPECT_NEAR(matched_rate(RateRule::adascale, 0.1, 4, 25, n), 0.1 * 8 / 5, 1e-12);  // σ² = μ² = 4
  EXPECT_DOUBLE_EQ(matched_rate(RateRule::adascale, 0.1, 4, 8, {.gradient = 0, .trace = 9}), 0.4)
      << "noise alone: linear";
  EXPECT_DOUBLE_EQ(matched_rate(RateRule::adascale, 0.1, 4, 8, {.gradient = 9, .trace = 0}), 0.1)
      << "no noise: larger batches bring nothing";
  EXPECT_TRUE(std::isinf(GradientNoise{.gradient = -1, .trace = 1}.scale()));

  // Of a model: gradients whose noise is known, since y = w·x with one weight has the gradient x.
  struct One : Module {
    One() { parameter("w", {1, 64}, Initial::constant(0)); }
    Variable forward(const Variable& x) override {
      return matmul(flatten(x), transpose(Module::parameter("w").variable, {1, 0}));
    }
  } model;
  auto backend = reference_backend(1);
  FlatParameters flat(model, *backend, 1);
  const Dataset data = synthetic({.side = 8, .channels = 1, .train = 512, .test = 10, .seed = 3});
  Loader loader(data.train, {.batch = 16, .prefetch = 0}, *backend);
  const Task task{[](const Variable& y, const Tensor&, Tensor*) { return mean(y); }};
  const GradientNoise measured = measure_noise(model, task, flat, loader, 32);
  Numbers sum(64), squares(64);
  loader.start(0);
  double count = 0;
  for (Batch b; loader.next(b); count += double(b.size()))
    for (std::size_t i = 0; const double v : b.images.values()) sum[i % 64] += v, squares[i % 64] += v * v, i++;
  double gradient = 0, trace = 0;
  for (std::size_t c = 0; c < 64; c++) {
    gradient += std::pow(sum[c] / count, 2);
    trace += squares[c] / count - std::pow(sum[c] / count, 2);
  }
  EXPECT_NEAR(measured.trace / trace, 1, 0.2);
  EXPECT_NEAR((measured.gradient + measured.trace / 512) / gradient, 1, 1e-4);
}

}  // namespace
}  // namespace tandem::test
