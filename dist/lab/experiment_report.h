// What each cell of an experiment came to, worked out once for its tables, its page and its figures.
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
  CensoredMean time;  // to the target; without a run where the plan has none
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
  std::size_t cells() const { return cells_.size(); }
  std::size_t cells_without_runs() const;         // without final ones
  std::string label(std::size_t strategy) const;  // without the values that are searched: "ringmaster:R+asgd:clip"
  std::string group_label(const std::vector<std::size_t>& group) const;  // "asgd +9"
  bool is_ablation(std::size_t strategy) const;                          // the first strategy with other constants
  std::string change(std::size_t ablation) const;                        // "clamp=off"
  std::vector<StrategyGroup> groups() const;  // one for few strategies, otherwise by what they do
  std::string conditions() const;             // of tuning and final runs, for captions; HTML
  // The runs that a figure leaves out; HTML.
  std::string missing(const std::string& cluster, const std::vector<int>& workers, bool ablations_only = false) const;

  const Plan& plan;
  const Results& results;
  std::vector<int> workers;  // ascending

 private:
  std::map<std::tuple<std::string, int, std::size_t>, CellReport> cells_;
};

}  // namespace tandem
