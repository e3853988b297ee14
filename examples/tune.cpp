// Which minibatch trains fastest per sample within a budget of memory, and the learning rate that goes with it (layers/train/tuner.h).
//
//   build/tune --model resnet20 --memory-budget 200M
//   build/tune --model resnet152 --memory-budget 8G --on h200 --ranks 4 --link 10
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "core/files/atomic_file.h"
#include "core/text.h"
#include "layers/train/tuner.h"
#include "tandem.h"

using namespace tandem;

namespace {

struct Asked {
  TunerOptions tuner;
  std::string on = "here", page, batches;
  int base_batch = 128;
  double base_rate = 0.05;
  bool measure = false;
  RateRule rule = RateRule::linear;
};

// An H200 as the simulated device has it: half of the arithmetic peak (TF32 for f32), four fifths of the memory's rate, PCIe 5.
SimulatedRates h200(DType dtype) {
  return {.flops = dtype == DType::bf16 ? 495e12 : 247e12, .memory = 3.84e12, .out = 55e9, .in = 55e9};
}

double number(const std::string& option, const std::string& text, double low) {
  const auto v = parsed<double>(text);
  if (!v || !(*v >= low) || !std::isfinite(*v)) refuse(option, " ", text, ": expected a number from ", low);
  return *v;
}

Options options(int argc, char** argv, Asked& a) {
  ExchangeModel& x = a.tuner.exchange;
  Options o = parse_options(
      argc, argv, "Finds the minibatch that is fastest per sample within a budget of memory.",
      {.data_set = "cifar10", .model = "resnet20", .epochs = 1},
      {"--data", "--data-set", "--size", "--model", "--dtype", "--threads", "--seed", "--memory-budget", "--swap", "--scratch", "--lr"},
      {{"--on", "here: this machine, measured; h200: a simulated GPU", a.on, [&](const std::string& v) {
          if (v != "here" && v != "h200") refuse("--on ", v, ": choose here or h200");
          a.on = v;
        }},
       {"--batches", "the minibatches to try: 32,64,… (default: from 8 until none fits)", "", [&](const std::string& v) { a.batches = v; }},
       {"--base-batch", "the minibatch for which --lr was chosen", "128",
        [&](const std::string& v) { a.base_batch = int(number("--base-batch", v, 1)); }},
       {"--rate-rule", "how the learning rate follows: linear, sqrt, lars or adascale", "linear", [&](const std::string& v) {
          const auto rule = rate_rule_in(v);
          if (!rule) refuse("--rate-rule ", v, ": choose linear, sqrt, lars or adascale");
          a.rule = *rule;
        }},
       {"--ranks", "how many train together", "1", [&](const std::string& v) { x.ranks = int(number("--ranks", v, 1)); }},
       {"--link", "Gbit/s of each rank's link (0: no limit)", "0", [&](const std::string& v) { x.link = number("--link", v, 0) * 1e9 / 8; }},
       {"--exchange", "server or all-reduce", "server", [&](const std::string& v) {
          if (v != "server" && v != "all-reduce") refuse("--exchange ", v, ": choose server or all-reduce");
          x.server = v == "server";
        }},
       {"--measure", "run the plans here too", "", [&](const std::string&) { a.measure = true; }, true},
       {"--page", "file for a page with charts (.html)", "", [&](const std::string& v) { a.page = v; }}});
  if (o.memory_budget == 0) refuse("--memory-budget: how much memory is there? Say --memory-budget 4G");
  if (a.measure && a.on != "here") refuse("--measure: only what is --on here can be measured here");
  for (std::size_t at = 0; at < a.batches.size();) {
    const std::size_t end = std::min(a.batches.find(',', at), a.batches.size());
    a.tuner.batches.push_back(std::int64_t(number("--batches", a.batches.substr(at, end - at), 1)));
    at = end + 1;
  }
  a.tuner.budget = o.memory_budget;
  return o;
}

std::string line_of(const TunedBatch& r, const ExchangeModel& x, std::int64_t samples, bool best) {
  if (!r.fits()) return printed("%7lld  does not fit: at least %s\n", static_cast<long long>(r.batch), readable_bytes(double(r.least)).c_str());
  const Forecast& f = r.choice.forecast;
  std::string line = printed("%7lld %11s %11s %11s %10.4g %10.3g %10.3g %10lld", static_cast<long long>(r.batch),
                             readable_bytes(double(f.peak)).c_str(), f.swapped ? readable_bytes(double(f.swapped)).c_str() : "–",
                             f.recomputed ? readable_bytes(double(f.recomputed)).c_str() : "–", 1e3 * r.per_sample(), 1e3 * f.stall,
                             1e3 * r.exposed, static_cast<long long>((samples + r.batch * x.ranks - 1) / (r.batch * x.ranks)));
  if (r.measured) line += printed(" %10.4g", 1e3 * (*r.measured + r.exposed) / double(r.batch));
  return line + (best ? "  ← fastest\n" : "\n");
}

GradientNoise noise_of(const Options& o, const Dataset& data, Backend& backend, double base_batch) {
  auto model = make_model(o.model, data.classes(), data.channels(), data.side());
  FlatParameters flat(*model, backend, o.seed);
  SGD sgd({.learning_rate = o.learning_rate, .momentum = 0.9});
  sgd.bind(flat);
  model->train(true);
  constexpr int before = 20;  // steps: at the first weights the gradient is large, and its noise says little
  Loader loader(data.train, {.batch = std::min<std::int64_t>(16, std::int64_t(base_batch)), .drop_last = true, .seed = o.seed}, backend);
  loader.start(0);
  Batch batch;
  for (int s = 0; s < before && loader.next(batch); s++) {
    flat.zero_gradients();
    Variable loss = cross_entropy((*model)(Variable(batch.images)), batch.labels);
    flat.backward(loss);
    sgd.step(&loss.value());
  }
  return measure_noise(*model, cross_entropy_loss(), flat, loader);
}

}  // namespace

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    Asked asked;
    Options o = options(argc, argv, asked);
    TunerOptions& tuner = asked.tuner;
    auto backend = make_backend(o);
    const Dataset data = load_dataset(o.data_set, o.data, o.folder);
    const Workload w{o.model, data.classes(), data.channels(), data.side(), o.dtype};
    const bool here = asked.on == "here", swaps = o.swap == SwapMode::automatic || o.swap == SwapMode::swap;
    tuner.means = {.swap = swaps, .recompute = o.swap == SwapMode::automatic || o.swap == SwapMode::recompute};
    auto mover = [&]() -> std::unique_ptr<Mover> { return here ? swaps ? file_mover(o.scratch) : nullptr : simulated_mover(h200(o.dtype)); };
    const std::int64_t first = here ? 16 : 2;
    const RecordedStep small = record_step(w, first, *backend, here ? nullptr : mover(), here ? 5 : 1);
    const RecordedStep large = record_step(w, 2 * first, *backend, here ? nullptr : mover(), here ? 5 : 1);
    if (swaps) {
      const MemoryMeans m = here ? measure_means(w, large, *backend, mover()) : MemoryMeans{.out = h200(o.dtype).out, .in = h200(o.dtype).in};
      tuner.means.out = m.out, tuner.means.in = m.in, tuner.means.slowdown = m.slowdown;
    }
    std::vector<TunedBatch> rows = tune(small, large, tuner);
    if (asked.measure)
      for (TunedBatch& r : rows)
        if (r.fits()) r.measured = measure_batch(w, r.batch, *backend, mover(), {.budget = tuner.budget, .swap = o.swap});
    const GradientNoise noise = noise_of(o, data, *backend, asked.base_batch);
    const TunedBatch& best = fastest(rows, std::max(noise.scale(), double(asked.base_batch)));
    std::printf("%s, %s, %s: budget %s, copies %s/s out and %s/s in\n", o.model.c_str(), name_of(o.dtype),
                here ? "measured here" : "a simulated H200", readable_bytes(double(tuner.budget)).c_str(),
                readable_bytes(tuner.means.out).c_str(), readable_bytes(tuner.means.in).c_str());
    std::printf("  batch        peak     swapped  recomputed  ms/sample   stall ms exposed ms pushes/epoch%s\n", asked.measure ? " measured" : "");
    for (const TunedBatch& r : rows) std::fputs(line_of(r, tuner.exchange, data.train.count(), &r == &best).c_str(), stdout);
    const double rate = matched_rate(asked.rule, o.learning_rate, double(best.batch) / asked.base_batch, asked.base_batch, noise);
    std::printf("gradient noise scale %s samples (at a minibatch above it each sample brings little)\n", short_number(noise.scale()).c_str());
    std::printf("learning rate %s at %d → %s at %lld (%s)\n", digits(o.learning_rate).c_str(), asked.base_batch, digits(rate, 4).c_str(),
                static_cast<long long>(best.batch), name_of(asked.rule));
    std::printf("build/train --data-set %s --model %s --batch %lld --lr %s --memory-budget %zu%s%s\n", o.data_set.c_str(), o.model.c_str(),
                static_cast<long long>(best.batch), digits(rate, 4).c_str(), tuner.budget,
                asked.rule == RateRule::linear && best.batch > asked.base_batch ? " --schedule warmup:5+cosine" : "",
                asked.rule == RateRule::lars ? " --optimizer lars" : "");
    if (asked.page.empty()) return;
    const std::string page = tuner_page(rows, best, tuner, o.model + ": the minibatch for " + readable_bytes(double(tuner.budget)));
    AtomicFile file(asked.page);
    file.write(page.data(), page.size());
    file.commit();
  });
}
