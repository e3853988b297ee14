// Asynchronous training by many workers, on one machine: real gradients in the order of a virtual clock
// (dist/lab/simulator.h).
//
//   build/simulate --strategy ddc-asgd --workers 16 --model smallcnn --epochs 2
//   build/simulate --json …         prints the run as one line of JSON, for dist/lab/experiment.py
#include <cmath>
#include <cstdio>

#include "core/build_info.h"
#include "core/checksum.h"
#include "core/clock.h"
#include "core/files/json.h"
#include "core/text.h"
#include "dist/lab/simulator.h"
#include "dist/server/asynchrony.h"
#include "dist/server/rules.h"
#include "dist/server/straggler_emulation.h"
#include "tandem.h"

using namespace tandem;

namespace {

double number(const std::string& option, const std::string& text, double low) {
  const auto v = parsed<double>(text);
  if (!v || !(*v >= low) || !std::isfinite(*v)) refuse(option, " ", text, ": expected a number from ", low);
  return *v;
}

// How the run is reported, and on which pictures it is evaluated.
struct Output {
  bool json = false, dry_run = false;
  std::string evaluate_on = {};  // test, held-out; empty: both
  std::string slow = {};
};

RunConfig options(int argc, char** argv, SimulatorOptions& s, Output& out) {
  VirtualCluster& c = s.cluster;
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
       "--metrics", "--partition", "--mean",     "--std"},
      {{"--strategy",
        "an update rule, ssp:3, bsp, ringmaster:R=4, fedbuff:B=4, rennala:B=4, all-reduce, local-sgd:8, "
        "post-local-sgd:8, cocod-sgd:8, easgd:8, outer:H=8, or with --partition fedavg, fedprox, scaffold or fednova",
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
       {"--slow",
        "WORKER:FACTOR,…: workers whose steps take so many times as long; half:4: the second half of them; "
        "classes:0-4:4: those with most of their pictures in these classes",
        "", [&](const std::string& v) { out.slow = v; }},
       {"--latency", "milliseconds of a message", "0",
        [&](const std::string& v) { c.latency = number("--latency", v, 0) / 1e3; }},
       {"--bandwidth", "Gbit/s of each worker's link (0: no limit)", "0",
        [&](const std::string& v) { c.bandwidth = number("--bandwidth", v, 0) * 1e9 / 8; }},
       {"--evaluate-every", "epochs between two evaluations: 10, or 0.25 for four an epoch", "1",
        [&](const std::string& v) { s.evaluate_every = number("--evaluate-every", v, 1e-6); }},
       {"--until", "ends the run at the evaluation that reaches this accuracy, above 0 to 1", "never",
        [&](const std::string& v) { s.until = number("--until", v, 1e-6); }},
       {"--evaluate-on", "test or held-out: which pictures (both, unless it is given)", "",
        [&](const std::string& v) {
          if (v != "test" && v != "held-out") refuse("--evaluate-on ", v, ": expected test or held-out");
          out.evaluate_on = v;
        }},
       {"--json", "prints the run as one line of JSON, and nothing else", "",
        [&](const std::string&) { out.json = true; }, true},
       {"--dry-run", "only checks the options, and says as JSON whether the strategy's rule keeps a momentum", "",
        [&](const std::string&) { out.dry_run = true; }, true}});
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

std::string exact(double v) { return digits(v, 17); }

template <class Values, class Text>
std::string listed(const char* brackets, const Values& values, const Text& text) {
  std::string all;
  for (const auto& v : values) all += (all.empty() ? "" : ",") + text(v);
  return brackets[0] + all + brackets[1];
}

// "60000 + 10000 pictures, 1a2b3c4d5e6f7081"
std::string described(const Dataset& data) {
  Checksum sum;
  for (const Pictures* p : {&data.train, &data.test})
    for (const Tensor* t : {&p->images, &p->labels}) sum.add(t->raw(), t->bytes());
  return printed("%lld + %lld pictures, ", static_cast<long long>(data.train.count()),
                 static_cast<long long>(data.test.count())) +
         hex(sum.value());
}

std::string json_of(const RunConfig& o, const SimulatorOptions& s, const SimulatorReport& r, const Dataset& data,
                    const std::string& backend, double wall_seconds) {
  const VirtualCluster& c = s.cluster;
  std::vector<double> epochs, seconds, accuracies;
  for (const SimulatorReport::Point& p : r.evaluations) {
    epochs.push_back(p.epoch);
    seconds.push_back(p.seconds);
    accuracies.push_back(p.test_accuracy ? *p.test_accuracy : *p.validation_accuracy);
  }
  std::string line = "{\"strategy\":" + json_quoted(s.strategy) + printed(",\"workers\":%d", c.workers) +
                     ",\"rate\":" + exact(o.learning_rate) + ",\"momentum\":" + exact(o.momentum) +
                     printed(",\"epochs\":%d,\"seed\":%llu", s.epochs, static_cast<unsigned long long>(s.seed)) +
                     ",\"status\":" + (r.diverged ? "\"diverged\"" : "\"ok\"");
  if (!r.diverged && !accuracies.empty())
    line +=
        std::string(r.evaluations.back().test_accuracy ? ",\"test\":" : ",\"validation\":") + exact(accuracies.back());
  line += ",\"evaluations\":{\"epoch\":" + listed("[]", epochs, exact) +
          ",\"seconds\":" + listed("[]", seconds, exact) + ",\"accuracy\":" + listed("[]", accuracies, exact) +
          "},\"class_accuracy\":" + listed("[]", r.class_accuracy, json_number) +
          ",\"delays\":" + listed("[]", r.delays, [](std::int64_t n) { return std::to_string(n); }) +
          ",\"participation\":" + json_number(r.participation) + ",\"dropped\":" + std::to_string(r.dropped) +
          ",\"refused\":" + std::to_string(r.refused) + ",\"gap\":" + json_number(r.gap) +
          ",\"correction\":" + json_number(r.correction) + ",\"wall_seconds\":" + json_number(wall_seconds);
  const auto slower = [](const auto& w) { return "\"" + std::to_string(w.first) + "\":" + exact(w.second); };
  line +=
      ",\"cluster\":{\"compute\":" + exact(c.compute) + ",\"shape\":" + exact(c.shape) +
      ",\"slower\":" + listed("{}", c.slower, slower) + ",\"latency\":" + exact(c.latency) +
      ",\"bandwidth\":" + exact(c.bandwidth) + "}" + ",\"settings\":" +
      listed("{}", s.settings, [](const auto& row) { return json_quoted(row.first) + ":" + json_quoted(row.second); });
  return line + ",\"data\":" + json_quoted(described(data)) +
         ",\"made_by\":" + json_quoted(version() + ", " + backend) + "}";
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
    Output out;
    const RunConfig o = options(argc, argv, s, out);
    auto backend = make_backend(o);
    if (out.dry_run) {
      std::printf("{\"strategy\":%s,\"momentum\":%s}\n", json_quoted(s.strategy).c_str(),
                  keeps_momentum(s.strategy) ? "true" : "false");
      return;
    }
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
      std::puts(json_of(o, s, r, data, backend->description(), seconds_since(began)).c_str());
      return;
    }
    show_delays(r);
    std::printf("%.1f s of virtual time; the seconds and images/s of each epoch are virtual, too", r.seconds);
    if (r.refused) std::printf("; %lld gradients were not finite and refused", static_cast<long long>(r.refused));
    std::printf("\n");
    if (r.diverged) fail("diverged: twenty gradients in a row were not finite. A smaller --lr helps");
    if (!r.epochs.empty() && r.epochs.back().test_accuracy)
      std::printf("test accuracy %.2f %%\n", 100 * *r.epochs.back().test_accuracy);
  });
}
