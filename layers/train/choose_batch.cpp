#include "layers/train/tuner.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "datasets/loader.h"
#include "layers/models/models.h"

namespace tandem {
namespace {

// Measures the gradient's noise after some steps: at the initial weights the gradient is large, and its noise is not
// representative.
GradientNoise noise_of(const RunConfig& o, const Dataset& data, Backend& backend, const TuneRequest& request) {
  constexpr std::int64_t most = 16;  // minibatches, and pictures in one
  const std::int64_t pictures = std::clamp<std::int64_t>(data.train.count() / most, 2, most);
  auto model = make_model(o.model, data.classes(), data.channels(), data.side());
  FlatParameters flat(*model, backend, o.seed);
  SGD sgd({.learning_rate = o.learning_rate * pictures / double(request.base_batch), .momentum = 0.9});
  sgd.bind(flat);
  model->train(true);
  Loader loader(data.train, {.batch = pictures, .dtype = o.dtype, .drop_last = true, .seed = o.seed}, backend);
  Batch batch;
  loader.start(0);
  for (int s = 0, epoch = 0; s < request.noise_steps; s++) {
    if (!loader.next(batch)) {
      loader.start(++epoch);
      loader.next(batch);
    }
    flat.zero_gradients();
    Variable loss = cross_entropy((*model)(Variable(batch.images)), batch.labels);
    flat.backward(loss);
    sgd.step(&loss.value());
  }
  return measure_noise(*model, cross_entropy_loss(), flat, loader,
                       int(std::clamp<std::int64_t>(data.train.count() / pictures, 2, most)));
}

void choose_rate(Tuned& t, const RunConfig& o, const TuneRequest& request) {
  t.batch = t.rows[t.best].batch * (request.tuner.exchange.server ? 1 : request.tuner.exchange.ranks);
  const double base = double(request.base_batch), times = double(t.batch) / base;
  t.rate = matched_rate(request.rule, o.learning_rate, times, base, t.noise.value_or(GradientNoise{}));
  t.schedule = o.schedule;
  // Linear scaling rises over five epochs, or a tenth of a shorter run, as fit() does when the batch grows with the
  // ranks.
  const Schedule given = Schedule::parse(o.schedule);
  if (request.rule == RateRule::linear && times > 1 && given.warmup == 0 && given.kind != Schedule::Kind::one_cycle)
    t.schedule = "warmup:" + digits(std::min(5.0, o.epochs / 10.0), 3) + "+" + o.schedule;
}

// ---- the predictions as lines of metrics ----------------------------------------------------------------------------
MetricFields line_of(const TunedBatch& b) {
  MetricFields line{{"event", "minibatch"}, {"minibatch", b.batch}};
  if (!b.fits()) {
    line.push_back({"least", std::int64_t(b.least)});
    return line;
  }
  const Forecast& f = b.choice.forecast;
  line.insert(line.end(), {{"peak", std::int64_t(f.peak)},
                           {"swapped", std::int64_t(f.swapped)},
                           {"recomputed", std::int64_t(f.recomputed)},
                           {"seconds", f.seconds},
                           {"stall", f.stall},
                           {"exposed", b.exposed},
                           {"sample_seconds", b.predicted_sample()}});
  if (b.measured) line.push_back({"measured_sample_seconds", b.per_sample()});
  return line;
}

// For each event, the bytes of the saved tensors with this fate that are in memory independently of the copies.
std::vector<double> held(const TunedBatch& b, Fate fate) {
  const std::size_t events = b.record.events.size();
  std::vector<double> bytes(events);
  for (std::size_t i = 0; i < b.record.saved.size(); i++) {
    const SavedRecord& s = b.record.saved[i];
    if (s.saved < 0 || b.choice.fates[i] != fate) continue;
    const int end = s.gone < 0 ? int(events) - 1 : s.gone, read = b.choice.forecast.read_at[i];
    for (int e = s.saved + 1; e <= end; e++)
      if (fate == Fate::keep || e <= std::max(s.free_at, s.last_used) || e >= read)
        bytes[std::size_t(e)] += double(s.bytes);
  }
  return bytes;
}

void add_memory(const TunedBatch& b, std::vector<MetricFields>& lines) {
  const std::vector<double> kept = held(b, Fate::keep), recomputed = held(b, Fate::recompute);
  for (std::size_t e = 0; e < b.choice.forecast.live.size(); e++) {
    const double all = double(b.choice.forecast.live[e]), rest = std::min(all, double(b.record.events[e].base));
    const double with_kept = std::min(all, rest + kept[e]), with_recomputed = std::min(all, with_kept + recomputed[e]);
    lines.push_back({{"event", "memory"},
                     {"seconds", b.record.events[e].seconds},
                     {"rest", std::int64_t(rest)},
                     {"kept", std::int64_t(with_kept - rest)},
                     {"recomputed", std::int64_t(with_recomputed - with_kept)},
                     {"swapped", std::int64_t(all - with_recomputed)}});
  }
}

// Budgets from the smallest one to one that needs no plan.
void add_budgets(const TunedBatch& b, MemoryMeans means, const std::string& name, std::vector<MetricFields>& lines) {
  const double least = double(smallest_budget(b.record, means)), most = double(peak_kept(b.record));
  for (int k = 0; k <= 10; k++) {
    const auto budget = std::size_t(std::ceil(least + (most - least) * k / 10));
    const MemoryChoice c = choose_memory(b.record, budget, means);
    if (!c.fits) continue;
    lines.push_back(
        {{"event", "budget"}, {"means", name}, {"budget", std::int64_t(budget)}, {"seconds", c.forecast.seconds}});
  }
}

// The rates of an H200 that kernels reach (our choice: half of the peak of 67 TFLOP/s in f32 and 990 in bf16, four
// fifths of the memory's 4.8 TB/s), with PCIe 5.
SimulatedRates h200_rates(DType dtype) {
  const double peak = dtype == DType::f32 ? 67e12 : 990e12;
  return {.flops = peak / 2, .memory = 0.8 * 4.8e12, .out = 55e9, .in = 55e9};
}

}  // namespace

Tuned tune_for(const RunConfig& o, const Dataset& data, Backend& backend, const TuneRequest& request) {
  if (request.rule == RateRule::lars && o.optimizer != "lars")
    refuse(
        "the rule lars scales the learning rate of the optimizer lars: say --optimizer lars, and an --lr that suits "
        "it");
  if (request.rule == RateRule::adascale && request.simulated)
    refuse("the rule adascale needs the gradient's noise, which a simulated device does not measure");
  const Workload w{o.model, data.classes(), data.channels(), data.side(), o.dtype};
  const SimulatedRates simulated = h200_rates(o.dtype);
  const bool swaps = o.swap == SwapMode::automatic || o.swap == SwapMode::swap;
  auto clock = [&]() -> std::unique_ptr<Mover> { return request.simulated ? simulated_mover(simulated) : nullptr; };
  auto mover = [&] { return request.simulated ? clock() : swaps ? file_mover(o.scratch) : nullptr; };

  Tuned t{.tuner = request.tuner};
  if (t.tuner.budget == 0) t.tuner.budget = o.memory_budget > 0 ? o.memory_budget : backend.memory().left();
  const std::int64_t pictures = std::max<std::int64_t>(1, data.train.count() / t.tuner.exchange.ranks);
  t.tuner.most = t.tuner.most > 0 ? std::min(t.tuner.most, pictures) : pictures;
  for (std::int64_t b : t.tuner.batches)
    if (b > pictures) refuse("a minibatch of ", b, ": there are ", pictures, " pictures for each rank");
  const std::int64_t first = request.simulated ? 2 : 16;
  const RecordedStep small = record_step(w, first, backend, clock(), request.simulated ? 1 : 5);
  const RecordedStep large = record_step(w, 2 * first, backend, clock(), request.simulated ? 1 : 5);
  if (swaps)
    t.tuner.means = request.simulated ? MemoryMeans{.out = simulated.out, .in = simulated.in}
                                      : measure_means(w, large, backend, mover());
  t.tuner.means.swap = swaps;
  t.tuner.means.recompute = o.swap == SwapMode::automatic || o.swap == SwapMode::recompute;
  t.rows = tune(small, large, t.tuner);
  if (request.measure)
    for (TunedBatch& r : t.rows)
      if (r.fits())
        r.measured = measure_batch(w, r.batch, backend, mover(), {.budget = t.tuner.budget, .swap = o.swap});
  double cap = 0;  // samples of a rank
  if (!request.simulated) {
    t.noise = noise_of(o, data, backend, request);
    cap =
        std::max(t.noise->scale(), double(request.base_batch)) / (t.tuner.exchange.server ? 1 : t.tuner.exchange.ranks);
  }
  t.best = std::size_t(&fastest(t.rows, cap) - t.rows.data());
  choose_rate(t, o, request);
  return t;
}

void choose_batch(RunConfig& o, const Dataset& data, Backend& backend) {
  if (o.batch > 0) return;
  if (local_size_from_environment() > 1)
    refuse(
        "--batch auto: ranks that share a machine cannot measure there; build/tune --ranks N names a minibatch for "
        "--batch");
  const Tuned t = tune_for(o, data, backend);
  const TunedBatch& b = t.rows[t.best];
  std::fprintf(stderr,
               "--batch auto: %ld within %s, %.3g ms a sample (%s swapped, %s recomputed); gradient noise scale %s; "
               "lr %s → %s\n",
               t.batch, readable_bytes(double(t.tuner.budget)).c_str(), 1e3 * b.per_sample(),
               readable_bytes(double(b.choice.forecast.swapped)).c_str(),
               readable_bytes(double(b.choice.forecast.recomputed)).c_str(), short_number(t.noise->scale()).c_str(),
               digits(o.learning_rate).c_str(), digits(t.rate, 4).c_str());
  o.batch = int(t.batch);
  o.learning_rate = t.rate;
  o.schedule = t.schedule;
}

std::vector<MetricFields> tuner_lines(const std::vector<TunedBatch>& rows, const TunedBatch& chosen,
                                      const MemoryMeans& means) {
  std::vector<MetricFields> lines;
  for (const TunedBatch& row : rows) lines.push_back(line_of(row));
  MemoryMeans swap = means, recompute = means;
  swap.recompute = recompute.swap = false;
  if (means.swap && means.recompute) add_budgets(chosen, means, "swap and recompute", lines);
  if (means.swap) add_budgets(chosen, swap, "swap", lines);
  if (means.recompute) add_budgets(chosen, recompute, "recompute", lines);
  add_memory(chosen, lines);
  return lines;
}

}  // namespace tandem
