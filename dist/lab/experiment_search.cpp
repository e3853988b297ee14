// The search of a cell, replayed over the results that there are: either it finds what is still to be run, or it is
// done.
#include <algorithm>
#include <numeric>
#include <set>

#include "core/error.h"
#include "core/text.h"
#include "dist/lab/experiment.h"

namespace tandem {
namespace {

struct Point {
  int rate = 0;                // doublings of the plan's smallest rate
  int momentum = 0;            // index into Lattice::momenta_
  std::vector<int> constants;  // indices for SearchedStrategy::Constant::at()
  auto operator<=>(const Point&) const = default;
};

class Lattice {
 public:
  Lattice(const Plan& plan, const Cell& cell) : plan_(plan), cell_(cell) {
    if (!cell.strategy->momentum) return;
    momenta_ = plan.momenta;
    if (momenta_.size() == 1) return;
    std::sort(momenta_.begin(), momenta_.end());
    if (momenta_[0] > 0) momenta_.insert(momenta_.begin(), 0);
    for (double more : {0.95, 0.98})
      if (more > momenta_.back()) momenta_.push_back(more);
  }

  std::vector<Point> grid() const {  // every rate, with the first momentum and the first constants
    Point p;
    if (momenta_.size() > 1)
      p.momentum = int(std::find(momenta_.begin(), momenta_.end(), plan_.momenta[0]) - momenta_.begin());
    for (const auto& c : cell_.strategy->constants) p.constants.push_back(c.first);
    std::vector<Point> all;
    for (double rate : plan_.rates) {
      p.rate = int(std::lround(std::log2(rate / plan_.rates[0])));
      all.push_back(p);
    }
    return all;
  }

  std::vector<double> constants(const Point& p) const {
    std::vector<double> values;
    for (std::size_t i = 0; i < p.constants.size(); i++)
      values.push_back(cell_.strategy->constants[i].at(p.constants[i]).value_or(0));
    return values;
  }
  Trial trial(const Point& p) const {
    return {cell_.strategy->filled(constants(p)),
            cell_.workers,
            cell_.cluster,
            std::ldexp(plan_.rates[0], p.rate),
            momenta_[std::size_t(p.momentum)],
            plan_.tuning_epochs,
            plan_.tuning_seed,
            false};
  }

  // Those that exist, in the order in which they are tried.
  std::vector<Point> neighbours(const Point& p) const {
    std::vector<Point> all;
    auto add = [&](auto change, int by) {
      Point q = p;
      change(q) += by;
      if (exists(q)) all.push_back(q);
    };
    for (int by : {1, -1}) add([](Point& q) -> int& { return q.rate; }, by);
    for (int by : {1, -1}) {  // with η/(1 − μ) about the same
      if (p.momentum + by < 0 || p.momentum + by >= int(momenta_.size())) continue;
      Point q = p;
      q.momentum += by;
      q.rate += int(
          std::lround(std::log2((1 - momenta_[std::size_t(q.momentum)]) / (1 - momenta_[std::size_t(p.momentum)]))));
      all.push_back(q);
    }
    for (std::size_t i = 0; i < p.constants.size(); i++)
      for (int by : {1, -1}) add([i](Point& q) -> int& { return q.constants[i]; }, by);
    return all;
  }
  bool at_last_momentum(const Point& p) const { return momenta_.size() > 1 && p.momentum + 1 == int(momenta_.size()); }

 private:
  bool exists(const Point& p) const {
    if (p.momentum < 0 || p.momentum >= int(momenta_.size())) return false;
    for (std::size_t i = 0; i < p.constants.size(); i++)
      if (!cell_.strategy->constants[i].at(p.constants[i])) return false;
    try {
      check_simulation({.strategy = trial(p).strategy, .cluster = {.workers = cell_.workers}});
    } catch (const UsageError&) {  // a value beyond what the rule allows
      return false;
    }
    return true;
  }

  const Plan& plan_;
  const Cell& cell_;
  std::vector<double> momenta_ = {0};
};

std::optional<double> seconds_of(const Plan& plan, const Outcome& o) {
  return plan.by_time && !o.diverged ? time_to(*plan.target, o) : std::nullopt;
}
// −1: it diverged; up to 1: its accuracy; above 1, by the plan's choice: it reached the target, and the sooner the
// more.
double score_of(const Plan& plan, const Outcome& o) {
  const auto seconds = seconds_of(plan, o);
  return o.diverged ? -1 : seconds ? 1 + 1 / (1 + *seconds) : o.accuracy;
}

class SearchReplay {
 public:
  SearchReplay(const Plan& plan, const Results& results, const Cell& cell)
      : plan_(plan), results_(results), lattice_(plan, cell) {}

  Search run() {
    for (const Point& p : lattice_.grid()) attempt(p);
    while (s_.missing.empty() && int(points_.size()) < plan_.search) {
      const auto next = best_first();
      if (!next) break;
      attempt(*next);
    }
    if (s_.missing.empty()) choose();
    return std::move(s_);
  }

 private:
  void attempt(const Point& p) {
    seen_.insert(p);
    const Trial t = lattice_.trial(p);
    const auto done = results_.find(t);
    if (done == results_.end()) return s_.missing.push_back(t);
    points_.push_back(p);
    s_.tried.push_back({t, score_of(plan_, done->second), seconds_of(plan_, done->second)});
  }

  std::vector<std::size_t> ranking() const {  // indices of what was tried, best first
    std::vector<std::size_t> order(points_.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return s_.tried[a].score > s_.tried[b].score; });
    return order;
  }
  std::optional<Point> untried_neighbour(const Point& p) const {
    for (const Point& q : lattice_.neighbours(p))
      if (!seen_.count(q)) return q;
    return {};
  }
  std::optional<Point> best_first() const {
    for (std::size_t i : ranking())
      if (auto q = untried_neighbour(points_[i])) return q;
    return {};
  }

  // Steps 3 and 4: the finalists' other seeds, and the best mean.
  void choose() {
    std::vector<std::size_t> finalists = ranking();
    finalists.resize(std::min(finalists.size(), std::size_t(plan_.finalists)));
    while (finalists.size() > 1 && s_.tried[finalists.back()].score < 0) finalists.pop_back();  // it diverged at once
    std::size_t best = finalists[0];
    double best_mean = -2;
    for (std::size_t i : finalists) {
      double sum = s_.tried[i].score;
      for (int k = 1; k < plan_.tuning_seeds; k++) {
        Trial t = s_.tried[i].trial;
        t.seed += std::uint64_t(k);
        const auto done = results_.find(t);
        if (done == results_.end())
          s_.missing.push_back(t);
        else
          sum += score_of(plan_, done->second);
      }
      if (sum / plan_.tuning_seeds > best_mean) best = i, best_mean = sum / plan_.tuning_seeds;
    }
    if (!s_.missing.empty()) return;
    s_.chosen = s_.tried[best].trial;
    s_.chosen->epochs = plan_.epochs;
    s_.chosen->seed = 1;
    s_.chosen->final = true;
    s_.constants = lattice_.constants(points_[best]);
    s_.edge = untried_neighbour(points_[best]).has_value() || lattice_.at_last_momentum(points_[best]);
  }

  const Plan& plan_;
  const Results& results_;
  Lattice lattice_;
  std::vector<Point> points_;  // as s_.tried
  std::set<Point> seen_;
  Search s_;
};

}  // namespace

std::vector<Cell> cells_of(const Plan& plan) {
  std::vector<Cell> all;
  for (int workers : plan.workers)
    for (const PlannedCluster& cluster : plan.clusters)
      for (const SearchedStrategy& s : plan.strategies) all.push_back({&s, workers, cluster.name});
  return all;
}

Search search(const Plan& plan, const Results& results, const Cell& cell) {
  return SearchReplay(plan, results, cell).run();
}

std::string chosen_text(const Search& s, const Cell& cell) {
  std::string text = "η " + digits(s.chosen->rate, 3);
  if (cell.strategy->momentum) text += ", μ " + digits(s.chosen->momentum, 3);
  for (std::size_t i = 0; i < s.constants.size(); i++)
    text += ", " + cell.strategy->constants[i].name + " " + digits(s.constants[i], 3);
  return text;
}

}  // namespace tandem
