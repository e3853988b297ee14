// Strategies × workers, by simulation, each with a tuned learning rate: build/experiment PLAN.json. Beside the plan
// it writes PLAN.jsonl, a line for each run (what was interrupted goes on), and PLAN.html, the page; the tables it prints.
//
//   build/experiment examples/experiments/fashion_mnist.json
#include <cstdio>
#include <filesystem>

#include "core/files/files.h"
#include "core/text.h"
#include "dist/lab/experiment.h"
#include "dist/lab/simulator.h"
#include "tandem.h"

using namespace tandem;

namespace {

struct Arguments {
  std::string plan, data, results, page;
  int jobs = 2;
  bool only_page = false, only_table = false;
};

Arguments arguments(int argc, char** argv) {
  Arguments a;
  std::vector<std::string> plans;
  auto into = [](std::string& to) { return [&to](const std::string& value) { to = value; }; };
  auto sets = [](bool& to) { return [&to](const std::string&) { to = true; }; };
  parse_command_line(argc, argv, "Strategies of distributed training, side by side, by simulation: experiment PLAN.json",
                     {{"--data", "folder of the data sets, or 'synthetic'", "", into(a.data)},
                      {"--jobs", "runs at a time, a thread each", "2",
                       [&](const std::string& v) {
                         a.jobs = parsed<int>(v).value_or(0);
                         if (a.jobs < 1 || a.jobs > 1000)
                           refuse("--jobs ", v, ": expected a number from 1 to 1000");
                       }},
                      {"--results", "the runs (default: beside the plan, .jsonl)", "", into(a.results)},
                      {"-o", "the page (default: beside the plan, .html)", "", into(a.page)},
                      {"--table", "only print the tables of the runs that there are", "", sets(a.only_table), true},
                      {"--page", "only draw the page of the runs that there are", "", sets(a.only_page), true}},
                     &plans);
  if (plans.size() != 1) refuse("which plan? build/experiment examples/experiments/fashion_mnist.json");
  a.plan = plans[0];
  const std::filesystem::path stem = std::filesystem::path(a.plan).replace_extension();
  if (a.results.empty()) a.results = stem.string() + ".jsonl";
  if (a.page.empty()) a.page = stem.string() + ".html";
  return a;
}

// One run of the plan, in a thread with a backend of its own.
Outcome run(const Trial& trial, const Plan& plan, const Dataset& data, Options o) {
  auto backend = cpu_backend(1);
  backend->deterministic(true);  // the same bits whatever else the machine does
  o.seed = trial.seed;
  Loaders loaders(data, o, *backend);
  FitData looks{loaders.train, trial.final ? nullptr : &*loaders.validation, trial.final ? &loaders.test : nullptr};
  auto model = make_model(plan.model, data.classes(), data.channels(), data.side());
  SimulatorOptions s{.strategy = trial.strategy,
                     .epochs = trial.epochs,
                     .schedule = Schedule::parse(plan.schedule),
                     .seed = trial.seed,
                     .progress = false};
  s.cluster.workers = trial.workers;
  s.cluster.shape = plan.shape;
  const SimulatorReport r =
      simulate(model, cross_entropy_loss(),
               {.learning_rate = trial.rate, .momentum = plan.momentum, .weight_decay = plan.weight_decay}, *backend, looks, s);
  Outcome out;
  out.diverged = r.diverged, out.gap = r.gap, out.correction = r.correction, out.participation = r.participation;
  out.delays.assign(r.delays.begin(), r.delays.end());
  double seconds = 0;
  for (const EpochReport& e : r.epochs) {
    out.accuracies.push_back(trial.final ? *e.test_accuracy : *e.validation_accuracy);
    out.seconds.push_back(seconds += e.seconds);
  }
  if (!r.diverged && !r.epochs.empty()) (trial.final ? out.test : out.validation) = out.accuracies.back();
  return out;
}

void show(const Trial& t, const Outcome& out) {
  const char* what = out.diverged ? "diverged" : t.final ? "test" : "held back";
  std::fprintf(stderr, "%-18s %4d workers  η %-9.4g %d epochs  seed %-5llu %s %.2f %%\n", t.strategy.c_str(), t.workers,
               t.rate, t.epochs, static_cast<unsigned long long>(t.seed), what, 100 * (t.final ? out.test : out.validation));
}

// What the results lack is trained first.
Results results_of(const Arguments& a, const Plan& plan) {
  Options o{.data = a.data, .model = plan.model, .batch = plan.batch, .augment = plan.augment, .val = plan.val};
  if (plan.dtype != "f32" && plan.dtype != "bf16") refuse(a.plan, ": \"dtype\" is f32 or bf16");
  o.dtype = plan.dtype == "bf16" ? DType::bf16 : DType::f32;
  check_model_name(plan.model);
  Schedule::parse(plan.schedule);
  for (const std::string& strategy : plan.strategies) check_simulation({.strategy = strategy});
  if (a.only_page) return read_results(a.results, plan);
  const Dataset data = load_dataset(plan.data_set, o.data, o.folder);
  return carry_out(plan, a.results, a.jobs, [&](const Trial& trial) { return run(trial, plan, data, o); }, show);
}

}  // namespace

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    const Arguments a = arguments(argc, argv);
    const Plan plan = read_plan(a.plan);
    if (a.only_table) {
      std::fputs(experiment_table(plan, read_results(a.results, plan)).c_str(), stdout);
      return;
    }
    check_replaceable("-o", a.page, R"(name="generator" content="Tandem")", "a page of experiment");
    const Results results = results_of(a, plan);
    write_file(a.page, experiment_page(plan, results));
    std::fputs(experiment_table(plan, results).c_str(), stdout);
    std::printf("%s: %zu runs\n", a.page.c_str(), results.size());
  });
}
