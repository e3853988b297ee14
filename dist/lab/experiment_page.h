// The parts of an experiment's page: what each cell came to, worked out once, and the figures (experiment_figures.cpp).
#pragma once
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "dist/lab/experiment.h"

namespace tandem {

struct CellReport {
  Cell cell;
  Search search;
  std::map<std::uint64_t, const Outcome*> runs;  // final ones, by seed
  CensoredMean accuracy;
};

// Strategies that share a panel of a figure, by their index in the plan. The first strategy and all-reduce are in each.
struct StrategyGroup {
  std::string name;
  std::vector<std::size_t> members;
};

class ExperimentReport {
 public:
  ExperimentReport(const Plan& plan, const Results& results);
  const CellReport& at(const std::string& cluster, int workers, std::size_t strategy) const;
  std::string label(std::size_t strategy) const;    // without the values that are searched: "ringmaster:R+asgd:clip"
  std::string group_label(const std::vector<std::size_t>& group) const;  // "asgd +9"
  bool is_ablation(std::size_t strategy) const;     // the first strategy with other constants
  std::string change(std::size_t ablation) const;   // "clamp=off"
  std::vector<StrategyGroup> groups() const;        // one for few strategies, otherwise by what they do
  std::string conditions() const;                   // of tuning and final runs, for captions; HTML
  std::string missing(const std::string& cluster, const std::vector<int>& workers, bool ablations_only = false) const;  // runs that a figure does not show; HTML

  const Plan& plan;
  const Results& results;
  std::vector<int> workers;  // ascending

 private:
  std::map<std::tuple<std::string, int, std::size_t>, CellReport> cells_;
};

// <figure>…</figure>, or nothing where there is nothing to show.
std::string accuracy_figure(const ExperimentReport& report, const std::string& cluster);
std::string time_figures(const ExperimentReport& report, const std::string& cluster);
std::string delay_figure(const ExperimentReport& report, const std::string& cluster);
std::string search_figure(const ExperimentReport& report, const std::string& cluster);
std::string ablation_figure(const ExperimentReport& report, const std::string& cluster);

// Strategies with the same delays and participation at every number of workers.
std::vector<std::vector<std::size_t>> delay_groups(const ExperimentReport& report, const std::string& cluster);

// A figure or table with what it shows (text) and under which conditions (HTML) under it; nothing without one.
std::string captioned(const std::string& html, const std::string& shown, const std::string& conditions);

}  // namespace tandem
