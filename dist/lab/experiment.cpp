#include "dist/lab/experiment.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <thread>

#include "core/error.h"
#include "core/files/files.h"
#include "core/files/json.h"
#include "core/text.h"
#include "dist/lab/experiment_results.h"

namespace tandem {
namespace {

// The file of results, open for more of them.
class ResultsFile {
 public:
  ResultsFile(const std::string& path, const Plan& plan) : path_(path), file_(path, std::ios::app) {
    if (!file_) refuse(path, ": ", cannot_write(path, errno));
    lock_.take(path, path, "writes its results there");
    results = read_results(path, plan);
    end_with_a_line();
    const std::string header = header_line(plan), all = read_file(path);
    const std::size_t last = all.rfind("{\"experiment\":");
    if (last == all.npos || all.compare(last, header.size(), header) != 0) file_ << header << std::flush;
  }
  void add(const Trial& t, const Outcome& o) {
    results[t] = o;
    file_ << line_of(t, o) << std::flush;
    if (!file_) fail(path_, ": cannot be written: is the disk full?");
  }
  Results results;

 private:
  // A last line that was cut off goes: it holds no run, and must not swallow the next one.
  void end_with_a_line() {
    const std::string all = read_file(path_);
    const std::size_t begin = all.rfind('\n') + 1;
    if (begin == all.size()) return;
    try {
      Json::parse(all.substr(begin));
      file_ << "\n" << std::flush;
    } catch (const Error&) {
      std::filesystem::resize_file(path_, begin);
    }
  }

  std::string path_;
  std::ofstream file_;
  FileLock lock_;
};

// The runs that a cell needs next: of its search, or final ones.
std::vector<Trial> missing_of(const Plan& plan, const Results& results, const Cell& cell) {
  Search s = search(plan, results, cell);
  if (!s.chosen) return s.missing;
  for (int k = 1; k <= plan.seeds; k++) {
    Trial t = *s.chosen;
    t.seed = std::uint64_t(k);
    if (!results.count(t)) s.missing.push_back(t);
  }
  return s.missing;
}

// Threads that take what is missing, whichever cell it is of, until nothing is.
class Runner {
 public:
  Runner(const Plan& plan, const std::string& path, const std::function<Outcome(const Trial&)>& run,
         const std::function<void(const Trial&, const Outcome&)>& ended)
      : plan_(plan), cells_(cells_of(plan)), run_(run), ended_(ended), file_(path, plan) {}

  Results all(int jobs) {
    std::vector<std::thread> threads;
    for (int j = 0; j < jobs; j++) threads.emplace_back([this] { work(); });
    for (auto& t : threads) t.join();
    if (failed_) std::rethrow_exception(failed_);
    return std::move(file_.results);
  }

 private:
  // What no thread has under way. None: nothing, for now or (done) for ever.
  std::optional<Trial> next(bool& done) {
    done = true;
    std::erase_if(cells_, [&](const Cell& cell) { return missing_of(plan_, file_.results, cell).empty(); });
    for (const Cell& cell : cells_)
      for (const Trial& t : missing_of(plan_, file_.results, cell)) {
        done = false;
        if (std::find(under_way_.begin(), under_way_.end(), t) == under_way_.end()) return t;
      }
    return {};
  }

  void work() {
    std::unique_lock lock(mutex_);
    while (!failed_) {
      bool done = false;
      const std::optional<Trial> t = next(done);
      if (done) return;
      if (!t) {
        changed_.wait(lock);
        continue;
      }
      under_way_.push_back(*t);
      try {
        const Outcome o = unlocked_run(*t, lock);
        file_.add(*t, o);
        ended_(*t, o);
      } catch (...) {
        if (!failed_) failed_ = std::current_exception();
      }
      under_way_.erase(std::find(under_way_.begin(), under_way_.end(), *t));
      changed_.notify_all();
    }
  }
  Outcome unlocked_run(const Trial& t, std::unique_lock<std::mutex>& lock) {
    struct Relock {
      std::unique_lock<std::mutex>& lock;
      ~Relock() { lock.lock(); }
    };
    lock.unlock();
    const Relock again{lock};
    const auto began = std::chrono::steady_clock::now();
    Outcome o = run_(t);
    o.wall_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    o.made_by = this_build();
    return o;
  }

  const Plan& plan_;
  std::vector<Cell> cells_;  // those that are not done
  const std::function<Outcome(const Trial&)>& run_;
  const std::function<void(const Trial&, const Outcome&)>& ended_;
  ResultsFile file_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Trial> under_way_;
  std::exception_ptr failed_;
};

// Mean wall seconds of an epoch of the runs that did not diverge; those of `workers` alone where there are any.
double seconds_per_epoch(const Results& results, int workers) {
  std::vector<double> same, all;
  for (const auto& [t, o] : results)
    if (!o.diverged) {
      all.push_back(o.wall_seconds / t.epochs);
      if (t.workers == workers) same.push_back(all.back());
    }
  return mean_of(same.empty() ? all : same).value;
}

}  // namespace

Results carry_out(const Plan& plan, const std::string& path, int jobs, const std::function<Outcome(const Trial&)>& run,
                  const std::function<void(const Trial&, const Outcome&)>& ended) {
  read_results(path, plan);  // refuses a wrong file before it is opened for writing
  return Runner(plan, path, run, ended).all(jobs);
}

std::string experiment_status(const Plan& plan, const Results& results, int jobs) {
  std::string text;
  double left = 0;
  std::size_t final_done = 0, final_all = 0, widest = 0;
  for (const PlannedCluster& c : plan.clusters) widest = std::max(widest, c.name.size());
  for (const Cell& cell : cells_of(plan)) {
    const Search s = search(plan, results, cell);
    const std::size_t done = final_runs(plan, results, cell).size(), points = s.tried.size();
    const int finalists = s.chosen                     ? 0
                          : int(points) == plan.search ? int(s.missing.size())
                                                       : plan.finalists * (plan.tuning_seeds - 1);
    const int searching = s.chosen ? 0 : std::max(0, plan.search - int(points)) + finalists;
    left += seconds_per_epoch(results, cell.workers) *
            (searching * plan.tuning_epochs + (plan.seeds - int(done)) * plan.epochs);
    final_done += done;
    final_all += std::size_t(plan.seeds);
    text += printed("%-40s %4d workers, %-*s  %3zu of %d points tried%s, %zu of %d final runs\n",
                    cell.strategy->text.c_str(), cell.workers, int(widest), cell.cluster.c_str(), points, plan.search,
                    s.chosen ? ", chosen" : "", done, plan.seeds);
  }
  text += printed("%zu runs, %zu of %zu final; ", results.size(), final_done, final_all);
  return text + (results.empty() ? "no run has ended: the time that is left is unknown\n"
                                 : printed("about %.1f hours are left with %s\n", left / 3600 / jobs,
                                           counted(jobs, "job").c_str()));
}

}  // namespace tandem
