#include "layers/train/tuner.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <set>

#include "core/clock.h"
#include "core/elementwise.h"
#include "core/random.h"
#include "layers/models/models.h"

namespace tandem {
namespace {

constexpr std::size_t no_end = std::size_t(1) << 60;

double median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + std::ptrdiff_t(v.size() / 2), v.end());
  return v[v.size() / 2];
}

// A model with its optimizer, and a minibatch of random pictures.
struct Trainer {
  Trainer(const Workload& w, std::int64_t batch, Backend& backend)
      : model(make_model(w.model, w.classes, w.channels, w.side)),
        flat(*model, backend, 1),
        sgd({.learning_rate = 0, .momentum = 0.9}) {
    sgd.if_not_finite = IfNotFinite::wait;
    sgd.bind(flat);
    model->train(true);
    const Philox random(1, 2u, 3u, 4u);
    std::vector<double> x(std::size_t(batch * w.side * w.side * w.channels)), y;
    for (std::size_t i = 0; i < x.size(); i++) x[i] = double(random.word(std::uint32_t(i))) / 2147483648.0 - 1;
    for (std::int64_t i = 0; i < batch; i++) y.push_back(double(i % w.classes));
    images = Tensor::of(backend, {batch, w.side, w.side, w.channels}, x, w.dtype);
    labels = Tensor::of(backend, {batch}, y, DType::i32);
    for (Tensor& t : ahead) t = Tensor::like(images);
  }
  double step(MemoryPlan& plan) {  // seconds of the update, which the plan does not include
    flat.zero_gradients();
    MemoryPlan::Step step(plan);
    flat.backward(cross_entropy((*model)(Variable(images)), labels));
    step.end();
    const auto began = Clock::now();
    sgd.update(nullptr);
    return seconds_since(began);
  }
  Model model;
  FlatParameters flat;
  SGD sgd;
  Tensor images, labels;
  std::array<Tensor, 3> ahead;  // as many batches as a loader holds in addition to the one in use
};

}  // namespace

RecordedStep record_step(const Workload& w, std::int64_t batch, Backend& backend, std::unique_ptr<Mover> mover,
                         int steps) {
  Trainer t(w, batch, backend);
  const bool clock_is_real = mover == nullptr;
  MemoryPlan plan(backend, std::move(mover), {.budget = no_end, .smallest = 1});
  std::vector<std::vector<double>> events, again;
  std::vector<double> updates;
  RecordedStep r{.batch = batch, .parameter_bytes = t.flat.values.bytes()};
  for (int s = 0; s < steps + 1; s++) {
    const double update = t.step(plan);
    if (s == 0) continue;  // backends prepare weights in the first
    updates.push_back(update);
    r.record = plan.record();
    events.resize(r.record.events.size());
    again.resize(r.record.saved.size());
    for (std::size_t i = 0; i < events.size(); i++) events[i].push_back(r.record.events[i].seconds);
    for (std::size_t i = 0; i < again.size(); i++) again[i].push_back(r.record.saved[i].recompute);
  }
  for (std::size_t i = 0; i < events.size(); i++) r.record.events[i].seconds = median(events[i]);
  for (std::size_t i = 0; i < again.size(); i++) r.record.saved[i].recompute = median(again[i]);
  r.update = clock_is_real ? median(updates) : 0;
  return r;
}

IterationRecord at_batch(const RecordedStep& small, const RecordedStep& large, std::int64_t batch) {
  require(small.record.events.size() == large.record.events.size() &&
              small.record.saved.size() == large.record.saved.size() && small.batch < large.batch,
          "two records of one workload are needed, the smaller minibatch first");
  const double along = double(batch - small.batch) / double(large.batch - small.batch);
  const auto line = [&](double a, double b) { return std::max(0.0, a + (b - a) * along); };
  IterationRecord r = large.record;
  for (std::size_t i = 0; i < r.events.size(); i++) {
    const EventRecord &a = small.record.events[i], &b = large.record.events[i];
    r.events[i].seconds =
        batch > large.batch ? std::max(b.seconds, line(a.seconds, b.seconds)) : line(a.seconds, b.seconds);
    r.events[i].base = std::size_t(line(double(a.base), double(b.base)));
  }
  for (std::size_t i = 0; i < r.saved.size(); i++) {
    const SavedRecord &a = small.record.saved[i], &b = large.record.saved[i];
    r.saved[i].bytes = std::size_t(line(double(a.bytes), double(b.bytes)));
    r.saved[i].scratch = std::size_t(line(double(a.scratch), double(b.scratch)));
    r.saved[i].recompute = a.recompute < 0 || b.recompute < 0 ? -1 : line(a.recompute, b.recompute);
  }
  return r;
}

double ExchangeModel::exposed(double bytes, double backward) const {
  if (ranks < 2 || link <= 0) return 0;
  const double once = bytes * (ranks - 1) / ranks / link;
  return server ? std::max(0.0, once - backward) + once : std::max(0.0, 2 * once - backward);
}

// ---- which minibatch ------------------------------------------------------------------------------------------------
std::size_t peak_kept(const IterationRecord& r) {
  return simulate(r, std::vector<Fate>(r.saved.size(), Fate::keep), no_end, {}).peak;
}

std::int64_t largest_kept(const RecordedStep& small, const RecordedStep& large, std::size_t budget) {
  std::int64_t fits = 0, does_not = std::int64_t(1) << 24;
  while (does_not - fits > 1) {
    const std::int64_t b = (fits + does_not) / 2;
    (peak_kept(at_batch(small, large, b)) <= budget ? fits : does_not) = b;
  }
  return fits;
}

std::vector<TunedBatch> tune(const RecordedStep& small, const RecordedStep& large, const TunerOptions& o) {
  std::vector<TunedBatch> rows;
  auto try_one = [&](std::int64_t batch) {
    TunedBatch row;
    row.batch = batch;
    row.record = at_batch(small, large, batch);
    row.update = large.update;
    row.least = smallest_budget(row.record, o.means);
    if (row.least <= o.budget) row.choice = choose_memory(row.record, o.budget, o.means);
    double backward = 0;  // seconds from the first event that reads a saved tensor
    int turn = int(row.record.events.size());
    for (const SavedRecord& s : row.record.saved)
      if (s.needed >= 0) turn = std::min(turn, s.needed);
    for (std::size_t e = std::size_t(turn); e < row.record.events.size(); e++) backward += row.record.events[e].seconds;
    row.exposed = o.exchange.exposed(double(large.parameter_bytes), backward);
    rows.push_back(std::move(row));
  };
  const std::int64_t most = o.most > 0 ? o.most : std::int64_t(1) << 24;
  std::set<std::int64_t> given(o.batches.begin(), o.batches.end());
  const std::int64_t kept = o.multiples.empty() ? 0 : largest_kept(small, large, o.budget);
  for (double m : o.multiples) given.insert(std::clamp<std::int64_t>(std::llround(m * double(kept)), 1, most));
  for (std::int64_t b : given) try_one(b);
  for (std::int64_t b = 8; given.empty() && b <= most; b += b & (b - 1) ? b / 3 : b / 2) {  // 8, 12, 16, 24, …
    try_one(b);
    if (rows.size() > 1 && !rows.back().fits() && !rows[rows.size() - 2].fits()) break;
  }
  if (rows.empty()) try_one(most);
  const auto least = std::min_element(rows.begin(), rows.end(), [](auto& a, auto& b) { return a.least < b.least; });
  if (std::none_of(rows.begin(), rows.end(), [](auto& r) { return r.fits(); }))
    refuse("a budget of ", readable_bytes(double(o.budget)), " is too small: a minibatch of ", least->batch,
           " needs --memory-budget ", least->least);
  return rows;
}

const TunedBatch& fastest(const std::vector<TunedBatch>& rows, double cap) {
  constexpr double same = 1.005;
  const TunedBatch* best = nullptr;
  for (const TunedBatch& r : rows)
    if (r.fits() && (cap <= 0 || double(r.batch) <= cap || !best))
      if (!best || r.per_sample() * same < best->per_sample()) best = &r;
  require(best != nullptr, "no minibatch fits");
  return *best;
}

const TunedBatch* part_of(const TunedBatch& whole, const std::vector<TunedBatch>& rows) {
  const TunedBatch* part = nullptr;
  for (const TunedBatch& r : rows)
    if (r.fits() && r.batch < whole.batch && whole.batch % r.batch == 0 &&
        r.choice.forecast.swapped + r.choice.forecast.recomputed == 0)
      part = &r;
  return part;
}

double measure_batch(const Workload& w, std::int64_t batch, Backend& backend, std::unique_ptr<Mover> mover,
                     const MemoryPlanOptions& options, int steps) {
  constexpr int planning = 4;
  Trainer t(w, batch, backend);
  MemoryPlan plan(backend, std::move(mover), options);
  std::vector<double> seconds;
  for (int s = 0; s < planning + steps; s++) {
    t.step(plan);
    if (s >= planning) seconds.push_back(plan.measured().seconds);
  }
  return median(seconds);
}

MemoryMeans measure_means(const Workload& w, const RecordedStep& recorded, Backend& backend,
                          std::unique_ptr<Mover> mover) {
  constexpr int planning = 2, steps = 7;
  const MemoryMeans swap{.swap = true, .recompute = false};
  const std::size_t most = peak_kept(recorded.record), least = smallest_budget(recorded.record, swap);
  Trainer t(w, recorded.batch, backend);
  MemoryPlan plan(backend, std::move(mover), {.budget = least + (most - least) / 2, .swap = SwapMode::swap});
  std::vector<double> slower;  // for each byte copied
  for (int s = 0; s < planning + steps; s++) {
    t.step(plan);
    if (s >= planning && plan.measured().swapped > 0)
      slower.push_back((plan.record().seconds() - recorded.record.seconds()) / double(2 * plan.measured().swapped));
  }
  MemoryMeans m = plan.means();
  if (!slower.empty()) m.slowdown = std::max(0.0, median(slower));
  return m;
}

// ---- which learning rate --------------------------------------------------------------------------------------------
double GradientNoise::scale() const { return gradient > 0 ? trace / gradient : double(INFINITY); }

GradientNoise gradient_noise(double small, double small_norm, double large, double large_norm) {
  return {.gradient = (large * large_norm - small * small_norm) / (large - small),
          .trace = (small_norm - large_norm) / (1 / small - 1 / large)};
}

GradientNoise measure_noise(Module& model, const Task& task, FlatParameters& flat, BatchSource& source, int pieces) {
  auto norm = [](const Tensor& g) {
    double sum = 0;
    for (double v : g.values()) sum += v * v;
    return sum;
  };
  double small_norm = 0, size = 0;
  Tensor all = Tensor::like(flat.gradients);
  all.fill(0);
  source.start(0);
  Batch batch;
  for (int k = 0; k < pieces; k++) {
    if (!source.next(batch)) refuse("the gradient's noise needs ", pieces, " minibatches, and an epoch has ", k);
    flat.zero_gradients();
    flat.backward(task.loss(model(Variable(batch.images)), batch.labels, nullptr));
    small_norm += norm(flat.gradients) / pieces;
    add_into(all, flat.gradients);
    size += double(batch.size()) / pieces;
  }
  return gradient_noise(size, small_norm, size * pieces, norm(all) / pieces / pieces);
}

const char* name_of(RateRule rule) { return std::array{"linear", "sqrt", "lars", "adascale"}[std::size_t(rule)]; }

double matched_rate(RateRule rule, double rate, double times, double base_batch, const GradientNoise& noise) {
  if (rule == RateRule::square_root) return rate * std::sqrt(times);
  if (rule != RateRule::adascale) return rate * times;
  const double variance = std::max(0.0, noise.trace) / base_batch, mean = std::max(0.0, noise.gradient);
  return variance + mean > 0 ? rate * (variance + mean) / (variance / times + mean) : rate;
}

}  // namespace tandem
