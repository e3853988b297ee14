// The tables of an experiment as Markdown.
#include <algorithm>

#include "core/text.h"
#include "dist/lab/experiment.h"

namespace tandem {
namespace {

std::vector<int> ascending(std::vector<int> v) {
  std::sort(v.begin(), v.end());
  return v;
}
std::string in_parentheses(const std::string& text) { return text.empty() ? "" : " (" + text + ")"; }
std::string one_line(const PairedText& t) { return t.value + (t.interval.empty() ? "" : " " + t.interval) + in_parentheses(t.pairs); }

// Tables while they are written: one for each cluster and quantity, with a column for each number of workers.
class Tables {
 public:
  Tables(const Plan& plan, const Results& results) : plan_(plan), results_(results), workers_(ascending(plan.workers)) {}

  std::string all() {
    text_ = printed("Each cell: %d points searched with %s of %s, %s with %s in all, %s with %s.\n", plan_.search, counted(plan_.tuning_epochs, "epoch").c_str(),
                    "one seed", counted(plan_.finalists, "finalist").c_str(), counted(plan_.tuning_seeds, "seed").c_str(),
                    counted(plan_.seeds, "final run").c_str(), counted(plan_.epochs, "epoch").c_str());
    for (const PlannedCluster& c : plan_.clusters) {
      accuracies(c.name);
      if (plan_.strategies.size() > 1 && !plan_.by_time) advantages(c.name);
      if (plan_.target) times(c.name);
    }
    const std::vector<Cell> cells = cells_of(plan_);
    const auto left = std::count_if(cells.begin(), cells.end(), [&](const Cell& c) { return final_runs(plan_, results_, c).empty(); });
    if (left) text_ += printed("\n%zu of %s: no final run yet.\n", std::size_t(left), counted(cells.size(), "cell").c_str());
    if (edges_) text_ += "\n† A neighbour of what was chosen was not tried within the budget.\n";
    return text_;
  }

 private:
  // A row for each strategy from the first-th on that has a final run; entry(cell, cell of the first strategy). No row: no table.
  template <class Entry>
  void table(const std::string& title, std::size_t first, const std::string& cluster, const Entry& entry) {
    std::string rows;
    for (std::size_t i = first; i < plan_.strategies.size(); i++) {
      std::string row;
      bool has_run = false;
      for (int k : workers_) {
        const Cell cell{&plan_.strategies[i], k, cluster};
        has_run = has_run || !final_runs(plan_, results_, cell).empty();
        row += " " + entry(cell, Cell{&plan_.strategies[0], k, cluster}) + " |";
      }
      if (has_run) rows += "| " + plan_.strategies[i].text + " |" + row + "\n";
    }
    if (rows.empty()) return;
    text_ += "\n" + title + "\n\n| workers |";
    for (int k : workers_) text_ += " " + std::to_string(k) + " |";
    text_ += "\n|---|";
    for (std::size_t i = 0; i < workers_.size(); i++) text_ += "---|";
    text_ += "\n" + rows;
  }

  std::string choice(const Cell& cell) {  // " (η 0.064, μ 0.9, R 4)†"
    const Search s = search(plan_, results_, cell);
    if (!s.chosen) return "";
    edges_ = edges_ || s.edge;
    return " (" + chosen_text(s, cell) + (s.edge ? ")†" : ")");
  }

  void accuracies(const std::string& cluster) {
    table("Cluster " + cluster + (plan_.by_time ? ": test accuracy in % where the target was reached, or at the end" : ": test accuracy in %") +
              ", mean ± standard error over seeds (what was chosen)", 0, cluster, [&](const Cell& cell, const Cell&) {
      const CensoredMean c = test_accuracy(plan_, results_, cell);
      return c.runs == 0 ? "–" : points(c.mean) + in_parentheses(censored_text(c, plan_.seeds)) + choice(cell);
    });
  }
  void advantages(const std::string& cluster) {
    table("Cluster " + cluster + ": points that " + plan_.strategies[0].text + " is better by, paired by seed [95 % t-interval]", 1, cluster,
          [&](const Cell& cell, const Cell& first) {
            return one_line(text_of(advantage(plan_, results_, first, cell), "%+.2f", 100, plan_.seeds));
          });
  }
  void times(const std::string& cluster) {
    const std::string target = digits(100 * *plan_.target, 4) + " %";
    table("Cluster " + cluster + ": virtual seconds to " + target + ", mean ± standard error over the seeds that reach it", 0, cluster,
          [&](const Cell& cell, const Cell&) {
            const CensoredMean c = time_to_target(plan_, results_, cell);
            return c.runs == 0 ? "–" : seconds_text(c.mean) + in_parentheses(censored_text(c, plan_.seeds));
          });
    if (plan_.strategies.size() > 1)
      table("Cluster " + cluster + ": time to " + target + " as a multiple of " + plan_.strategies[0].text + "'s, geometric mean over seeds [95 % t-interval]",
            1, cluster, [&](const Cell& cell, const Cell& first) {
              return one_line(text_of(time_ratio(plan_, results_, cell, first), "%.2f", 1, plan_.seeds));
            });
  }

  const Plan& plan_;
  const Results& results_;
  std::vector<int> workers_;
  std::string text_;
  bool edges_ = false;
};

}  // namespace

std::string experiment_table(const Plan& plan, const Results& results) { return Tables(plan, results).all(); }

}  // namespace tandem
