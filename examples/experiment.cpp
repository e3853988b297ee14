// Strategies × workers, by simulation, each with the learning rate that suits it: build/experiment PLAN.json. Beside the plan
// it writes PLAN.jsonl, a line for each run (what was interrupted goes on), and PLAN.html, the page; the tables it prints.
//
//   build/experiment examples/experiments/fashion_mnist.json
#include <cstdio>
#include <filesystem>
#include <optional>
#include <sstream>

#include "core/files/files.h"
#include "dist/lab/experiment.h"
#include "dist/lab/simulator.h"
#include "tandem.h"

using namespace tandem;

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    std::vector<std::string> paths;
    std::string data, results_file, page_file;
    int jobs = 2;
    bool only_page = false, only_table = false;
    auto into = [](std::string& to) { return [&to](const std::string& value) { to = value; }; };
    parse_command_line(argc, argv,
                       "Strategies of distributed training, side by side, by simulation: experiment PLAN.json",
                       {{"--data", "folder of the data sets, or 'synthetic'", "", into(data)},
                        {"--jobs", "runs at a time, a thread each", "2",
                         [&](const std::string& v) {
                           std::istringstream in(v);
                           if (!(in >> jobs) || !in.eof() || jobs < 1 || jobs > 1000)
                             refuse("--jobs ", v, ": expected a number from 1 to 1000");
                         }},
                        {"--results", "the runs (default: beside the plan, .jsonl)", "", into(results_file)},
                        {"-o", "the page (default: beside the plan, .html)", "", into(page_file)},
                        {"--table", "only print the tables of the runs that there are", "",
                         [&](const std::string&) { only_table = true; }, true},
                        {"--page", "only draw the page of the runs that there are", "",
                         [&](const std::string&) { only_page = true; }, true}},
                       &paths);
    if (paths.size() != 1) refuse("which plan? build/experiment examples/experiments/fashion_mnist.json");
    const Plan plan = read_plan(paths[0]);
    const std::filesystem::path stem = std::filesystem::path(paths[0]).replace_extension();
    if (results_file.empty()) results_file = stem.string() + ".jsonl";
    if (page_file.empty()) page_file = stem.string() + ".html";
    if (only_table) {
      std::fputs(experiment_table(plan, read_results(results_file, plan)).c_str(), stdout);
      return;
    }
    check_replaceable("-o", page_file, R"(name="generator" content="Tandem")", "a page of experiment");

    Options o{.data = data, .model = plan.model, .batch = plan.batch, .augment = plan.augment, .val = plan.val};
    if (plan.dtype != "f32" && plan.dtype != "bf16") refuse(paths[0], ": \"dtype\" is f32 or bf16");
    o.dtype = plan.dtype == "bf16" ? DType::bf16 : DType::f32;
    check_model_name(plan.model);
    const Schedule schedule = Schedule::parse(plan.schedule);
    for (const std::string& strategy : plan.strategies) check_simulation({.strategy = strategy});

    std::optional<Dataset> pictures;  // a page or a table needs none
    if (!only_page) pictures = load_dataset(plan.data_set, o.data, o.folder);
    auto run = [&](const Trial& trial) {
      auto backend = cpu_backend(1);  // this thread's own
      backend->deterministic(true);   // the same bits whatever else the machine does
      const Dataset& set = *pictures;
      Options mine = o;
      mine.seed = trial.seed;
      Loaders loaders(set, mine, *backend);
      FitData looks{loaders.train, trial.final ? nullptr : &*loaders.validation, trial.final ? &loaders.test : nullptr};
      auto model = make_model(plan.model, set.classes(), set.channels(), set.side());
      SimulatorOptions s{.strategy = trial.strategy,
                         .epochs = trial.epochs,
                         .schedule = schedule,
                         .seed = trial.seed,
                         .progress = false};
      s.cluster.workers = trial.workers;
      s.cluster.shape = plan.shape;
      const SimulatorReport r =
          simulate(model, cross_entropy_loss(),
                   {.learning_rate = trial.rate, .momentum = plan.momentum, .weight_decay = plan.weight_decay},
                   *backend, looks, s);
      Outcome out;
      out.diverged = r.diverged, out.gap = r.gap, out.correction = r.correction;
      out.delays.assign(r.delays.begin(), r.delays.end());
      double seconds = 0;
      for (const EpochReport& e : r.epochs) {
        out.accuracies.push_back(trial.final ? *e.test_accuracy : *e.validation_accuracy);
        out.seconds.push_back(seconds += e.seconds);
      }
      if (!r.diverged && !r.epochs.empty()) (trial.final ? out.test : out.validation) = out.accuracies.back();
      return out;
    };
    auto ended = [&](const Trial& t, const Outcome& out) {
      std::fprintf(stderr, "%-18s %4d workers  η %-9.4g %d epochs  seed %-5llu %s %.2f %%\n", t.strategy.c_str(),
                   t.workers, t.rate, t.epochs, static_cast<unsigned long long>(t.seed),
                   out.diverged ? "diverged"
                   : t.final    ? "test"
                                : "held back",
                   100 * (t.final ? out.test : out.validation));
    };
    const Results results =
        only_page ? read_results(results_file, plan) : carry_out(plan, results_file, jobs, run, ended);
    write_file(page_file, experiment_page(plan, results));
    std::fputs(experiment_table(plan, results).c_str(), stdout);
    std::printf("%s: %zu runs\n", page_file.c_str(), results.size());
  });
}
