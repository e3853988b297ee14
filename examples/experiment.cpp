// Strategies × workers × clusters, by simulation, each tuned with the same budget: build/experiment PLAN.json. Beside
// the plan it writes PLAN.jsonl, a line for each run (what was interrupted goes on), and PLAN.html, the page; the
// tables it prints.
//
//   build/experiment --data synthetic examples/experiments/small.json
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>

#include "core/checksum.h"
#include "core/files/files.h"
#include "core/text.h"
#include "dist/lab/experiment.h"
#include "dist/lab/experiment_results.h"
#include "tandem.h"

using namespace tandem;

namespace {

struct Arguments {
  std::vector<std::string> plans;
  std::string data, results, page;
  int jobs = 2, check = 0;
  std::uint64_t check_seed = std::uint64_t(std::chrono::system_clock::now().time_since_epoch().count()) % 1000000;
  double check_seconds = 300;
  bool only_page = false, only_table = false, only_status = false;

  std::string results_of(const std::string& plan) const { return beside(plan, results, ".jsonl"); }
  std::string page_of(const std::string& plan) const { return beside(plan, page, ".html"); }

 private:
  static std::string beside(const std::string& plan, const std::string& given, const char* ending) {
    return given.empty() ? std::filesystem::path(plan).replace_extension().string() + ending : given;
  }
};

// "3" or "3,17"
void read_check(const std::string& v, Arguments& a) {
  const std::size_t comma = v.find(',');
  const auto rows = parsed<int>(v.substr(0, comma));
  const auto seed = comma == v.npos ? a.check_seed : parsed<std::uint64_t>(v.substr(comma + 1));
  if (!rows || *rows < 1 || !seed) refuse("--check ", v, ": expected a number of rows from 1, or ROWS,SEED");
  a.check = *rows;
  a.check_seed = *seed;
}

Arguments arguments(int argc, char** argv) {
  Arguments a;
  bool seconds_given = false;
  auto into = [](std::string& to) { return [&to](const std::string& value) { to = value; }; };
  auto sets = [](bool& to) { return [&to](const std::string&) { to = true; }; };
  parse_command_line(
      argc, argv, "Strategies of distributed training, side by side, by simulation: experiment PLAN.json",
      {{"--data", "folder of the data sets, or 'synthetic'", "", into(a.data)},
       {"--jobs", "runs at a time, a thread each", "2",
        [&](const std::string& v) {
          a.jobs = parsed<int>(v).value_or(0);
          if (a.jobs < 1 || a.jobs > 1000) refuse("--jobs ", v, ": expected a number from 1 to 1000");
        }},
       {"--results", "the runs (default: beside the plan, .jsonl)", "", into(a.results)},
       {"-o", "the page (default: beside the plan, .html)", "", into(a.page)},
       {"--table", "only print the tables of the runs that there are", "", sets(a.only_table), true},
       {"--page", "only draw the page of the runs that there are", "", sets(a.only_page), true},
       {"--status", "only print what is done and the hours that are left", "", sets(a.only_status), true},
       {"--check",
        "ROWS or ROWS,SEED: run so many rows of the results again, drawn from those of all plans that are named, and "
        "compare",
        "", [&](const std::string& v) { read_check(v, a); }},
       {"--check-seconds", "--check: only rows that took at most so long", "300",
        [&](const std::string& v) {
          seconds_given = true;
          a.check_seconds = parsed<double>(v).value_or(0);
          if (!(a.check_seconds > 0)) refuse("--check-seconds ", v, ": expected a number above 0");
        }}},
      &a.plans);
  if (int(a.only_table) + int(a.only_page) + int(a.only_status) + int(a.check > 0) > 1)
    refuse("--table, --page, --status and --check exclude each other: choose one");
  if (seconds_given && !a.check) refuse("--check-seconds has an effect only with --check");
  if (a.plans.empty() || (a.plans.size() > 1 && (!a.check || !a.results.empty())))
    refuse("name one plan (--check takes several): build/experiment examples/experiments/small.json");
  return a;
}

// The data of a plan, and its runs: each in a thread with a backend of its own.
class Lab {
 public:
  // folder: for checkpoints of runs; empty: no checkpoints. Throws UsageError when the data are missing, and when the
  // plan does not fit the data or this CPU.
  Lab(const Plan& plan, const std::string& data, const std::string& folder)
      : plan_(plan),
        options_{.data = data, .model = plan.model, .batch = plan.batch, .augment = plan.augment, .val = plan.val},
        folder_(folder) {
    options_.dtype = plan.dtype == "bf16" ? DType::bf16 : DType::f32;
    data_ = load_dataset(plan.data_set, options_.data, options_.folder);
    auto backend = cpu_backend(1);
    if (!backend->supports(options_.dtype)) refuse("\"dtype\" is ", plan.dtype, ", which this CPU does not have");
    Loaders(data_, options_, *backend);  // throws for a batch or held-out pictures that the data do not have
  }
  ~Lab() {
    std::error_code none;
    if (ran_) std::filesystem::remove(folder_, none);  // when it is empty
  }

  // "60000 + 10000 pictures, 1a2b3c4d5e6f7081"
  std::string data() const {
    Checksum sum;
    for (const Pictures* p : {&data_.train, &data_.test})
      for (const Tensor* t : {&p->images, &p->labels}) sum.add(t->raw(), t->bytes());
    return std::to_string(data_.train.count()) + " + " + std::to_string(data_.test.count()) + " pictures, " +
           hex(sum.value());
  }

  Outcome run(const Trial& trial) {
    // Not before the first run: the folder may belong to another process that carries out the same plan, and then this
    // one has no runs.
    std::call_once(first_run_, [&] {
      if (!folder_.empty()) make_folder("--results " + folder_, folder_), ran_ = true;
    });
    auto backend = cpu_backend(1);
    backend->deterministic(true);  // the same bits whatever else the machine does
    Options o = options_;
    o.seed = trial.seed;
    Loaders loaders(data_, o, *backend);
    const FitData looks{loaders.train, trial.final ? nullptr : &*loaders.validation,
                        trial.final ? &loaders.test : nullptr};
    auto model = make_model(plan_.model, data_.classes(), data_.channels(), data_.side());
    const SimulatorOptions s = simulation_of(trial);
    return outcome_of(
        trial, simulate(model, cross_entropy_loss(),
                        {.learning_rate = trial.rate, .momentum = trial.momentum, .weight_decay = plan_.weight_decay},
                        *backend, looks, s));
  }

 private:
  SimulatorOptions simulation_of(const Trial& trial) const {
    SimulatorOptions s{.strategy = trial.strategy,
                       .epochs = trial.epochs,
                       .schedule = Schedule::parse(plan_.schedule),
                       .seed = trial.seed,
                       .progress = false};
    for (const PlannedCluster& c : plan_.clusters)
      if (c.name == trial.cluster) s.cluster = c.of(trial.workers);
    s.evaluate_every = trial.final || plan_.by_time ? plan_.evaluate_every : trial.epochs;
    if (plan_.by_time) s.until = *plan_.target;
    if (!folder_.empty()) {  // a checkpoint of another program or of other conditions would be refused, so its name is
                             // another one
      const std::size_t hash = std::hash<std::string>()(text_of(trial) + header_line(plan_));
      s.checkpoint = (std::filesystem::path(folder_) / (hex(hash) + ".state")).string();
    }
    return s;
  }
  static std::string text_of(const Trial& t) {
    return printed("%s, %d workers, %s, %.17g, %.17g, %d, %llu, %d", t.strategy.c_str(), t.workers, t.cluster.c_str(),
                   t.rate, t.momentum, t.epochs, static_cast<unsigned long long>(t.seed), t.final);
  }
  static Outcome outcome_of(const Trial& trial, const SimulatorReport& r) {
    Outcome out;
    out.diverged = r.diverged;
    out.gap = r.gap;
    out.correction = r.correction;
    out.participation = r.participation;
    out.dropped = double(r.dropped);
    out.refused = double(r.refused);
    out.delays.assign(r.delays.begin(), r.delays.end());
    for (const SimulatorReport::Point& p : r.evaluations)
      out.evaluations.push_back({p.epoch, p.seconds, trial.final ? *p.test_accuracy : *p.validation_accuracy});
    if (!r.diverged && !out.evaluations.empty()) out.accuracy = out.evaluations.back().accuracy;
    return out;
  }

  const Plan& plan_;
  Options options_;
  std::string folder_;
  Dataset data_;
  std::once_flag first_run_;
  bool ran_ = false;
};

// Loads the data, which the plan then names: results of other data are refused. The plan must outlive the laboratory.
std::unique_ptr<Lab> lab_of(const std::string& path, Plan& plan, const std::string& data,
                            const std::string& folder) try {
  auto lab = std::make_unique<Lab>(plan, data, folder);
  plan.data = lab->data();
  return lab;
} catch (const UsageError& e) {
  refuse(path, ": ", e.what());
}

void show(std::FILE* to, const Trial& t, const Outcome& out) {
  const std::string accuracy =
      out.diverged ? "diverged" : printed("%s %.2f %%", t.final ? "test" : "held back", 100 * out.accuracy);
  std::fprintf(to, "%-26s %4d workers  %-8s η %-9.4g μ %-5.3g %d epochs  seed %-5llu %s, %.0f s\n", t.strategy.c_str(),
               t.workers, t.cluster.c_str(), t.rate, t.momentum, t.epochs, static_cast<unsigned long long>(t.seed),
               accuracy.c_str(), out.wall_seconds);
}

// Rows of all plans' results, drawn together, are run again. Throws Error when one contradicts what is recorded.
void check(const Arguments& a) {
  std::vector<Plan> plans;
  std::vector<Results> results;
  Results all;  // of every plan, whose index stands before the cluster's name
  for (const std::string& path : a.plans) {
    plans.push_back(read_plan(path)), plans.back().synthetic = a.data == "synthetic";
    results.push_back(read_results(a.results_of(path), plans.back()));
    if (plans.back().dtype == "bf16" && !cpu_backend(1)->supports(DType::bf16)) {
      std::printf("%s: left out, because this CPU has no bf16\n", path.c_str());
      continue;
    }
    for (const auto& [t, o] : results.back()) {
      Trial numbered = t;
      numbered.cluster = std::to_string(plans.size() - 1) + " " + t.cluster;
      all[numbered] = o;
    }
  }
  const auto rows = rows_to_check(all, a.check, a.check_seed, a.check_seconds);
  std::printf("%zu of %zu rows, drawn with seed %llu of those that took at most %g s\n", rows.size(), all.size(),
              static_cast<unsigned long long>(a.check_seed), a.check_seconds);
  if (rows.empty()) fail("there is no row to check");
  std::vector<std::unique_ptr<Lab>> labs(plans.size());
  int wrong = 0;
  for (Trial t : rows) {
    const auto space = t.cluster.find(' ');
    const std::size_t i = std::stoul(t.cluster.substr(0, space));
    t.cluster.erase(0, space + 1);
    if (!labs[i]) {
      labs[i] = lab_of(a.plans[i], plans[i], a.data, "");
      read_results(a.results_of(a.plans[i]), plans[i]);  // throws when they had other data
    }
    const auto began = std::chrono::steady_clock::now();
    Outcome again = labs[i]->run(t);
    again.wall_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    again.made_by = this_build();
    show(stdout, t, again);
    const Outcome& was = results[i].at(t);
    const std::string why = contradiction(results[i], t, again);
    const char* agrees = was.diverged != again.diverged
                             ? "not decided: on one of two CPUs it diverged, only times were compared"
                         : was.evaluations == again.evaluations ? "agrees, every evaluation to the bit"
                                                                : "agrees";
    std::printf("%s: %s\n", a.plans[i].c_str(), why.empty() ? agrees : why.c_str());
    wrong += !why.empty();
  }
  if (wrong) fail(counted(wrong, "row"), " of ", rows.size(), " contradict the results");
}

void one_plan(const Arguments& a) {
  const std::string path = a.plans[0], results_path = a.results_of(path), page = a.page_of(path);
  Plan plan = read_plan(path);
  plan.synthetic = a.data == "synthetic";
  if ((a.only_table || a.only_page) && !std::filesystem::exists(results_path))
    refuse(results_path, ": there are no results: build/experiment ", path, " makes them");
  if (a.only_status || a.only_table) {
    const Results results = read_results(results_path, plan);
    std::fputs((a.only_status ? experiment_status(plan, results, a.jobs) : experiment_table(plan, results)).c_str(),
               stdout);
    return;
  }
  check_replaceable("-o", page, R"(name="generator" content="Tandem")", "a page of experiment");
  Results results;
  if (a.only_page) {
    results = read_results(results_path, plan);
  } else {
    if (this_build().find("-dirty") != std::string::npos)
      std::fprintf(
          stderr,
          "note: this build has changes that are not committed: its results name a commit that does not have them\n");
    const auto lab = lab_of(path, plan, a.data, results_path + ".d");
    results = read_results(results_path, plan);
    std::fprintf(stderr, "runs done: %zu; when it is interrupted, the same command goes on\n", results.size());
    if (!std::filesystem::exists(page))
      write_file(page, experiment_page(plan, results));  // whether that can be done is known before the runs
    results = carry_out(
        plan, results_path, a.jobs, [&](const Trial& trial) { return lab->run(trial); },
        [](const Trial& t, const Outcome& out) { show(stderr, t, out); });
  }
  write_file(page, experiment_page(plan, results));
  if (!a.only_page) std::fputs(experiment_table(plan, results).c_str(), stdout);
  std::printf("%s: %zu runs\n", page.c_str(), results.size());
}

}  // namespace

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    const Arguments a = arguments(argc, argv);
    if (a.check)
      check(a);
    else
      one_plan(a);
  });
}
