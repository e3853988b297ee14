// Asynchronous training by many workers, on one machine: real gradients in the order of a virtual clock
// (dist/lab/simulator.h).
//
//   build/simulate --strategy ddc-asgd --workers 16 --model smallcnn --epochs 2
#include <cmath>
#include <cstdio>

#include "core/text.h"
#include "dist/lab/simulator.h"
#include "dist/server/straggler_emulation.h"
#include "tandem.h"

using namespace tandem;

namespace {

double number(const std::string& option, const std::string& text, double low) {
  const auto v = parsed<double>(text);
  if (!v || !(*v >= low) || !std::isfinite(*v)) refuse(option, " ", text, ": expected a number from ", low);
  return *v;
}

Options options(int argc, char** argv, SimulatorOptions& s) {
  VirtualCluster& c = s.cluster;
  std::string slow;
  Options o = parse_options(
      argc, argv, "Simulates asynchronous training by many workers.",
      {.data_set = "fashion-mnist",
       .model = "smallcnn",
       .epochs = 2,
       .batch = 64,
       .learning_rate = 0.02,
       .schedule = "constant",
       .nesterov = false,
       .threads = 1,
       .deterministic = true},
      {"--data",    "--data-set",   "--size",     "--skip-broken", "--model",        "--epochs",
       "--batch",   "--lr",         "--schedule", "--momentum",    "--weight-decay", "--label-smoothing",
       "--augment", "--no-augment", "--cutout",   "--mixup",       "--seed",         "--device",
       "--dtype",   "--threads",    "--val",      "--metrics"},
      {{"--strategy",
        "an update rule, ssp:3, bsp, ringmaster:R=4, fedbuff:B=4, rennala:B=4, all-reduce, local-sgd:8, "
        "post-local-sgd:8, cocod-sgd:8, easgd:8 or outer:H=8",
        s.strategy, [&](const std::string& v) { s.strategy = v; }},
       {"--workers", "how many", "8",
        [&](const std::string& v) {
          const double n = number("--workers", v, 1);
          if (n != std::floor(n) || n > 1e9) refuse("--workers ", v, ": expected a whole number up to 1000000000");
          c.workers = int(n);
        }},
       {"--compute", "milliseconds of a step, on average", "128",
        [&](const std::string& v) { c.compute = number("--compute", v, 0) / 1e3; }},
       {"--shape", "of the Gamma distribution of that time: the smaller, the more it varies (0: not at all)", "100",
        [&](const std::string& v) { c.shape = number("--shape", v, 0); }},
       {"--slow", "WORKER:FACTOR,…: workers whose steps take so many times as long; half:4: the second half of them",
        "", [&](const std::string& v) { slow = v; }},
       {"--latency", "milliseconds of a message", "0",
        [&](const std::string& v) { c.latency = number("--latency", v, 0) / 1e3; }},
       {"--bandwidth", "Gbit/s of each worker's link (0: no limit)", "0",
        [&](const std::string& v) { c.bandwidth = number("--bandwidth", v, 0) * 1e9 / 8; }},
       {"--evaluate-every", "epochs between two evaluations: 10, or 0.25 for four an epoch", "1",
        [&](const std::string& v) { s.evaluate_every = number("--evaluate-every", v, 1e-6); }},
       {"--checkpoint",
        "a file that holds an interrupted run after its last epoch; where it is there, the run goes on from it; "
        "removed at the end",
        "", [&](const std::string& v) { s.checkpoint = v; }}});
  c.slower = parse_slower(slow, c.workers);
  s.epochs = o.epochs;
  s.schedule = Schedule::parse(o.schedule);
  s.seed = o.seed;
  s.metrics = o.metrics;
  s.settings = fit_options(o).settings;
  check_simulation(s);
  return o;
}

// How many gradients were how late, as bars: at most 16 lines.
void show_delays(const SimulatorReport& r) {
  std::int64_t pushes = 0, sum = 0, most = 0;
  const std::size_t step = (r.delays.size() + 15) / 16;
  std::vector<std::int64_t> bars;
  for (std::size_t d = 0; d < r.delays.size(); d++) {
    pushes += r.delays[d];
    sum += std::int64_t(d) * r.delays[d];
    if (d % step == 0) bars.push_back(0);
    most = std::max(most, bars.back() += r.delays[d]);
  }
  if (!pushes) return;
  std::printf("delay of a gradient, in updates: %.2f on average\n", double(sum) / double(pushes));
  for (std::size_t b = 0; b < bars.size(); b++) {
    std::string bar;
    for (std::int64_t k = 0; k < 40 * bars[b] / most; k++) bar += "█";
    std::printf("%6zu %8lld%s%s\n", b * step, static_cast<long long>(bars[b]), bar.empty() ? "" : " ", bar.c_str());
  }
  if (r.dropped)
    std::printf("%lld gradients came too late and were dropped: %.1f %% of all were applied\n",
                static_cast<long long>(r.dropped), 100 * r.participation);
  if (r.gap == 0) return;  // one worker, or a run too short to look
  std::printf("distance to the weights it was made at: %.3g a parameter; correction: %.3g of the gradient\n", r.gap,
              r.correction);
}

}  // namespace

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    SimulatorOptions s;
    const Options o = options(argc, argv, s);
    auto backend = make_backend(o);
    Dataset data = load_dataset(o.data_set, o.data, o.folder);
    Loaders loaders(data, o, *backend);
    auto model = make_model(o.model, data.classes(), data.channels(), data.side());
    const SimulatorReport r =
        simulate(model, cross_entropy_loss(o.label_smoothing),
                 {.learning_rate = o.learning_rate, .momentum = o.momentum, .weight_decay = o.weight_decay}, *backend,
                 loaders, s);
    show_delays(r);
    std::printf("%.1f s of virtual time; the seconds and images/s of each epoch are virtual, too", r.seconds);
    if (r.refused) std::printf("; %lld gradients were not finite and refused", static_cast<long long>(r.refused));
    std::printf("\n");
    if (r.diverged) fail("diverged: twenty gradients in a row were not finite. A smaller --lr helps");
    if (!r.epochs.empty()) std::printf("test accuracy %.2f %%\n", 100 * *r.epochs.back().test_accuracy);
  });
}
