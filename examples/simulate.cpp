// Asynchronous training by many workers, on one machine: real gradients in the order of a virtual clock
// (dist/lab/simulator.h).
//
//   build/simulate --strategy ddc-asgd --workers 16 --model smallcnn --epochs 2
//   build/simulate --json …         prints the run as one line of JSON, for dist/lab/experiment.py
#include <cstdio>
#include <nlohmann/json.hpp>

#include "core/build_info.h"
#include "core/checksum.h"
#include "core/clock.h"
#include "core/text.h"
#include "dist/lab/simulator.h"
#include "dist/server/asynchrony.h"
#include "dist/server/rules.h"
#include "dist/server/straggler_emulation.h"
#include "tandem.h"

namespace tandem {
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(VirtualCluster, compute, shape, latency, bandwidth)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(SimulatorReport, class_accuracy, delays, participation, dropped, refused, gap,
                                   correction)
}  // namespace tandem

using namespace tandem;

namespace {

// The form of the report, the pictures of the evaluation, and the slow workers as given.
struct Output {
  bool json = false, dry_run = false;
  std::string evaluate_on = "both", slow = {};
};

RunConfig options(int argc, char** argv, SimulatorOptions& s, Output& out) {
  VirtualCluster& c = s.cluster;
  double compute = c.compute * 1e3, latency = 0, bandwidth = 0;
  OptionRows own;
  own.text(
      "--strategy", s.strategy,
      "an update rule, ssp:3, bsp, ringmaster:R=4, fedbuff:B=4, rennala:B=4, all-reduce, local-sgd:8, "
      "post-local-sgd:8, cocod-sgd:8, easgd:8, outer:H=8, or with --partition fedavg, fedprox, scaffold or fednova");
  own.number("--workers", c.workers, 1, OptionRows::large, "how many");
  own.number("--compute", compute, 0, 1e9, "milliseconds of a step, on average");
  own.number("--shape", c.shape, 0, 1e9,
             "of the Gamma distribution of that time: the smaller, the more it varies (0: not at all)");
  own.text("--slow", out.slow,
           "WORKER:FACTOR,…: workers whose steps take so many times as long; half:4: the second half of them; "
           "classes:0-4:4: those with most of their pictures in these classes");
  own.number("--latency", latency, 0, 1e9, "milliseconds of a message");
  own.number("--bandwidth", bandwidth, 0, 1e9, "Gbit/s of each worker's link (0: no limit)");
  own.number("--evaluate-every", s.evaluate_every, 1e-6, 1e9,
             "epochs between two evaluations: 10, or 0.25 for four an epoch");
  own.number("--until", s.until, 1e-6, 2, "ends the run at the evaluation that reaches this accuracy (2: never)");
  own.choice("--evaluate-on", out.evaluate_on, {"both", "test", "held-out"},
             "which pictures: those of the test, those held out of the training, or both");
  own.flag("--json", out.json, true, "prints the run as one line of JSON, and nothing else");
  own.flag("--dry-run", out.dry_run, true,
           "only checks the options, and says as JSON whether the strategy's rule keeps a momentum");
  RunConfig o = parse_options(
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
      {"--data",    "--data-set",  "--size",     "--skip-broken",  "--model",           "--epochs",  "--batch",
       "--lr",      "--schedule",  "--momentum", "--weight-decay", "--label-smoothing", "--augment", "--no-augment",
       "--cutout",  "--mixup",     "--seed",     "--device",       "--dtype",           "--threads", "--val",
       "--metrics", "--partition", "--mean",     "--std",          "--reflect"},
      own.all);
  c.compute = compute / 1e3;
  c.latency = latency / 1e3;
  c.bandwidth = bandwidth * 1e9 / 8;
  s.epochs = o.epochs;
  s.schedule = Schedule::parse(o.schedule);
  s.seed = o.seed;
  s.metrics = o.metrics;
  s.settings = settings_of(o, OptionSpec::Decides::program);
  if (o.partition != "shared") s.settings.push_back({"--partition", o.partition});
  s.progress = !out.json;
  check_simulation(s);
  if (out.evaluate_on == "held-out" && o.val == 0)
    refuse("--evaluate-on held-out: how many training pictures? Say --val 5000");
  return o;
}

// ---- as JSON --------------------------------------------------------------------------------------------------------
// Whether the update rule of a strategy keeps a velocity. All-reduce, and steps of SGD between exchanges, have one.
bool keeps_momentum(const std::string& strategy) {
  if (!Asynchrony::is_one(strategy)) return true;
  const Rule::Keeps keeps = make_rule(Asynchrony::parse(strategy).rule)->keeps();
  return keeps.velocity || keeps.own;
}

// "60000 + 10000 pictures, 1a2b3c4d5e6f7081"
std::string described(const Dataset& data) {
  Checksum sum;
  for (const Pictures* p : {&data.train, &data.test})
    for (const Tensor* t : {&p->images, &p->labels}) sum.add(t->raw(), t->bytes());
  return std::to_string(data.train.count()) + " + " + std::to_string(data.test.count()) + " pictures, " +
         hex(sum.value());
}

nlohmann::json json_of(const RunConfig& o, const SimulatorOptions& s, const SimulatorReport& r, const Dataset& data) {
  nlohmann::json all = r;
  for (const char* name : {"epoch", "seconds", "accuracy"}) all["evaluations"][name] = nlohmann::json::array();
  for (const SimulatorReport::Point& p : r.evaluations) {
    const double accuracy = p.test_accuracy ? *p.test_accuracy : *p.validation_accuracy;
    all["evaluations"]["epoch"].push_back(p.epoch);
    all["evaluations"]["seconds"].push_back(p.seconds);
    all["evaluations"]["accuracy"].push_back(accuracy);
    if (!r.diverged) all[p.test_accuracy ? "test" : "validation"] = accuracy;  // the last evaluation remains
  }
  all["strategy"] = s.strategy;
  all["workers"] = s.cluster.workers;
  all["cluster"] = s.cluster;
  all["cluster"]["slower"] = nlohmann::json::object();
  for (const auto& [worker, factor] : s.cluster.slower) all["cluster"]["slower"][std::to_string(worker)] = factor;
  all["epochs"] = s.epochs;
  all["seed"] = s.seed;
  all["rate"] = o.learning_rate;
  all["momentum"] = o.momentum;
  all["status"] = r.diverged ? "diverged" : "ok";
  for (const auto& [name, value] : s.settings) all["settings"][name] = value;
  all["data"] = described(data);
  return all;
}
void print(const nlohmann::json& line) {
  std::puts(line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
}

// Prints the number of gradients for each delay, as bars in at most 16 lines.
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
    std::printf("%6zu %8ld%s%s\n", b * step, bars[b], bar.empty() ? "" : " ", bar.c_str());
  }
  if (r.dropped)
    std::printf("dropped, since too late: %s; %.1f %% of all were applied\n", counted(r.dropped, "gradient").c_str(),
                100 * r.participation);
  if (r.gap == 0) return;  // one worker, or the run was too short to measure it
  std::printf("distance to the weights it was made at: %.3g a parameter; correction: %.3g of the gradient\n", r.gap,
              r.correction);
}

}  // namespace

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    SimulatorOptions s;
    Output out;
    const RunConfig o = options(argc, argv, s, out);
    auto backend = make_backend(o);
    if (out.dry_run) return print({{"strategy", s.strategy}, {"momentum", keeps_momentum(s.strategy)}});
    Dataset data = load_dataset(o.data_set, o.data, o.folder);
    const auto began = Clock::now();
    Loaders loaders(data, o, *backend);
    s.cluster.slower = parse_slower(out.slow, s.cluster.workers, loaders.train.parts(s.cluster.workers));
    FitData looks = loaders;
    if (out.evaluate_on == "held-out") looks.test = nullptr;
    if (out.evaluate_on == "test") looks.validation = nullptr;
    auto model = make_model(o.model, data.classes(), data.channels(), data.side());
    const SimulatorReport r = simulate(
        model, cross_entropy_loss(o.label_smoothing),
        {.learning_rate = o.learning_rate, .momentum = o.momentum, .weight_decay = o.weight_decay}, *backend, looks, s);
    if (out.json) {
      nlohmann::json line = json_of(o, s, r, data);
      line["made_by"] = version() + ", " + backend->description();
      line["wall_seconds"] = seconds_since(began);
      return print(line);
    }
    show_delays(r);
    std::printf("%.1f s of virtual time; the seconds and images/s of each epoch are virtual, too", r.seconds);
    if (r.refused) std::printf("; not finite and refused: %s", counted(r.refused, "gradient").c_str());
    std::printf("\n");
    if (r.diverged) fail("diverged: twenty gradients in a row were not finite. A smaller --lr helps");
    if (!r.epochs.empty() && r.epochs.back().test_accuracy)
      std::printf("test accuracy %.2f %%\n", 100 * *r.epochs.back().test_accuracy);
  });
}
