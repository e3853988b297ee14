// What each cell of an experiment came to, and what captions say of it.
#include <algorithm>

#include "core/text.h"
#include "dist/lab/experiment_page.h"
#include "layers/export/chart.h"

namespace tandem {
namespace {

std::string of_seeds(std::uint64_t first, int n) {
  return n == 1 ? printed("seed %d", int(first)) : printed("seeds %d–%d", int(first), int(first) + n - 1);
}

// "drop or collect" and so on, by the text of a strategy.
std::string kind_of(const SearchedStrategy& s) {
  auto begins = [&](std::initializer_list<const char*> names) {
    return std::any_of(names.begin(), names.end(), [&](const char* name) { return s.text.starts_with(name); });
  };
  if (begins({"all-reduce", "bsp", "local-sgd", "post-local-sgd", "cocod-sgd", "easgd", "outer", "ssp"}))
    return "Synchronous and local steps";
  if (begins({"ringmaster", "fedbuff", "rennala", "quorum"})) return "Dropping or collecting pushes";
  if (s.text.find("dc-asgd") != std::string::npos || s.text.find("dana-dc") != std::string::npos)
    return "Delay compensation";
  return s.momentum ? "Momentum" : "Without momentum";
}

}  // namespace

ExperimentReport::ExperimentReport(const Plan& p, const Results& r) : plan(p), results(r), workers(p.workers) {
  std::sort(workers.begin(), workers.end());
  for (const Cell& c : cells_of(plan)) {
    const auto strategy = std::size_t(c.strategy - &plan.strategies[0]);
    cells_[{c.cluster, c.workers, strategy}] = {c, search(plan, results, c), final_runs(plan, results, c),
                                                test_accuracy(plan, results, c),
                                                plan.target ? time_to_target(plan, results, c) : CensoredMean{}};
  }
}

std::size_t ExperimentReport::cells_without_runs() const {
  return std::size_t(
      std::count_if(cells_.begin(), cells_.end(), [](const auto& cell) { return cell.second.runs.empty(); }));
}

const CellReport& ExperimentReport::at(const std::string& cluster, int k, std::size_t strategy) const {
  return cells_.at({cluster, k, strategy});
}

std::string ExperimentReport::label(std::size_t strategy) const {
  std::string text;
  for (std::string piece : plan.strategies[strategy].pieces) {
    if (piece.ends_with("=")) piece.pop_back();
    text += piece;
  }
  if (text.ends_with(":")) text.pop_back();  // "local-sgd:{4,8}"
  return text;
}

std::string ExperimentReport::group_label(const std::vector<std::size_t>& group) const {
  return label(group[0]) + (group.size() > 1 ? " +" + std::to_string(group.size() - 1) : "");
}

bool ExperimentReport::is_ablation(std::size_t strategy) const {
  const std::string& first = plan.strategies[0].text;
  return strategy > 0 && plan.strategies[strategy].text.starts_with(first.substr(0, first.find(':')) + ":");
}

std::string ExperimentReport::change(std::size_t ablation) const {
  const std::string text = label(ablation);
  return text.substr(text.find(':') + 1);
}

std::vector<StrategyGroup> ExperimentReport::groups() const {
  std::vector<StrategyGroup> all;
  const bool few = plan.strategies.size() <= 8;
  for (std::size_t i = 0; i < plan.strategies.size(); i++) {
    const std::string name = few              ? ""
                             : is_ablation(i) ? "Variants of " + plan.strategies[0].text
                                              : kind_of(plan.strategies[i]);
    if (!few && (i == 0 || plan.strategies[i].text == "all-reduce")) continue;  // they are in every group
    const auto same = std::find_if(all.begin(), all.end(), [&](const StrategyGroup& g) { return g.name == name; });
    if (same == all.end())
      all.push_back({name, {i}});
    else
      same->members.push_back(i);
  }
  return all;
}

std::string ExperimentReport::conditions() const {
  const std::string again = plan.tuning_seeds > 1
                                ? printed(", the best %d also with %s", plan.finalists,
                                          of_seeds(int(plan.tuning_seed) + 1, plan.tuning_seeds - 1).c_str())
                                : "";
  return html_escaped(
      plan.model + " on " + plan.data_set + ", " + plan.dtype + (plan.augment ? ", augmented" : "") +
      printed("; %s over all workers, batch %d a worker, schedule ", counted(plan.epochs, "epoch").c_str(),
              plan.batch) +
      plan.schedule +
      printed(", weight decay %g; final runs: %s. Tuned for each strategy, K and cluster: η, μ where the rule has "
              "one, and the constants that are named without a value; budget: %s "
              "with seed %llu%s, %s each, by %s on %d held-out pictures.",
              plan.weight_decay, of_seeds(1, plan.seeds).c_str(), counted(plan.search, "point").c_str(),
              static_cast<unsigned long long>(plan.tuning_seed), again.c_str(),
              counted(plan.tuning_epochs, "epoch").c_str(), plan.by_time ? "the time to the target" : "accuracy",
              plan.val));
}

std::string ExperimentReport::missing(const std::string& cluster, const std::vector<int>& of,
                                      bool ablations_only) const {
  std::string text;
  int not_begun = 0;
  for (int k : of)
    for (std::size_t i = 0; i < plan.strategies.size(); i++) {
      if (ablations_only && i > 0 && !is_ablation(i)) continue;
      const CensoredMean& a = at(cluster, k, i).accuracy;
      not_begun += a.runs == 0;
      if (a.runs == 0) continue;
      const std::size_t planned = std::size_t(plan.seeds), gone = a.diverged + (planned - a.runs);
      const char* why = a.diverged == gone ? "diverged" : a.diverged ? "diverged or not run" : "not run";
      if (gone)
        text +=
            (text.empty() ? "" : "; ") + label(i) + printed(", K = %d: %zu of %zu runs (%s)", k, gone, planned, why);
    }
  if (not_begun) text += (text.empty() ? "" : "; ") + counted(not_begun, "cell") + " not run";
  return " Left out: " + html_escaped(text.empty() ? "nothing" : text) + ".";
}

std::string captioned(const std::string& html, const std::string& shown, const std::string& conditions) {
  if (html.empty()) return "";
  return "<figure>\n" + html + "<figcaption><span>" + html_escaped(shown) + "</span> " + conditions +
         "</figcaption>\n</figure>\n";
}

}  // namespace tandem
