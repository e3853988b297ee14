// The tables of an experiment as Markdown.
#include "core/text.h"
#include "dist/lab/experiment_report.h"

namespace tandem {
namespace {

std::string in_parentheses(const std::string& text) { return text.empty() ? "" : " (" + text + ")"; }
std::string one_line(const PairedText& t) {
  return t.value + (t.interval.empty() ? "" : " " + t.interval) + in_parentheses(t.pairs);
}

// Tables while they are written: one for each cluster and quantity, with a column for each number of workers.
class Tables {
 public:
  Tables(const Plan& plan, const Results& results) : plan_(plan), report_(plan, results) {}

  std::string all() {
    text_ = printed("Each cell: %d points searched with %s of %s, %s with %s in all, %s with %s.\n", plan_.search,
                    counted(plan_.tuning_epochs, "epoch").c_str(), "one seed",
                    counted(plan_.finalists, "finalist").c_str(), counted(plan_.tuning_seeds, "seed").c_str(),
                    counted(plan_.seeds, "final run").c_str(), counted(plan_.epochs, "epoch").c_str());
    for (const PlannedCluster& c : plan_.clusters) {
      accuracies(c.name);
      if (plan_.strategies.size() > 1 && !plan_.by_time) advantages(c.name);
      if (plan_.target) times(c.name);
    }
    if (const std::size_t left = report_.cells_without_runs())
      text_ += printed("\n%zu of %s: no final run yet.\n", left, counted(report_.cells(), "cell").c_str());
    if (edges_) text_ += "\n† A neighbour of what was chosen was not tried within the budget.\n";
    return text_;
  }

 private:
  // A row for each strategy from the first-th on that has a final run; entry(cell, cell of the first strategy). No row:
  // no table.
  template <class Entry>
  void table(const std::string& title, std::size_t first, const std::string& cluster, const Entry& entry) {
    std::string rows;
    for (std::size_t i = first; i < plan_.strategies.size(); i++) {
      std::string row;
      bool has_run = false;
      for (int k : report_.workers) {
        const CellReport& cell = report_.at(cluster, k, i);
        has_run = has_run || !cell.runs.empty();
        row += " " + entry(cell, report_.at(cluster, k, 0)) + " |";
      }
      if (has_run) rows += "| " + plan_.strategies[i].text + " |" + row + "\n";
    }
    if (rows.empty()) return;
    text_ += "\n" + title + "\n\n| workers |";
    for (int k : report_.workers) text_ += " " + std::to_string(k) + " |";
    text_ += "\n|---|";
    for (std::size_t i = 0; i < report_.workers.size(); i++) text_ += "---|";
    text_ += "\n" + rows;
  }

  std::string choice(const CellReport& c) {  // " (η 0.064, μ 0.9, R 4)†"; it has final runs
    edges_ = edges_ || c.search.edge;
    return " (" + chosen_text(c.search, c.cell) + (c.search.edge ? ")†" : ")");
  }

  void accuracies(const std::string& cluster) {
    table("Cluster " + cluster +
              (plan_.by_time ? ": test accuracy in % where the target was reached, or at the end"
                             : ": test accuracy in %") +
              ", mean ± standard error over seeds (what was chosen)",
          0, cluster, [&](const CellReport& c, const CellReport&) {
            return c.runs.empty()
                       ? "–"
                       : points(c.accuracy.mean) + in_parentheses(censored_text(c.accuracy, plan_.seeds)) + choice(c);
          });
  }
  void advantages(const std::string& cluster) {
    table("Cluster " + cluster + ": points that " + plan_.strategies[0].text +
              " is better by, paired by seed [95 % t-interval]",
          1, cluster, [&](const CellReport& c, const CellReport& first) {
            return one_line(text_of(advantage(plan_, report_.results, first.cell, c.cell), "%+.2f", 100, plan_.seeds));
          });
  }
  void times(const std::string& cluster) {
    const std::string target = target_text(plan_), first = plan_.strategies[0].text;
    table("Cluster " + cluster + ": virtual seconds to " + target +
              ", mean ± standard error over the seeds that reach it (at the first "
              "evaluation: the time of that)",
          0, cluster, [&](const CellReport& c, const CellReport&) {
            return c.runs.empty() ? "–"
                                  : seconds_text(c.time.mean) + in_parentheses(censored_text(c.time, plan_.seeds));
          });
    if (plan_.strategies.size() > 1)
      table("Cluster " + cluster + ": time to " + target + " as a multiple of " + first +
                "'s, geometric mean over the seeds that both reach "
                "it after the first evaluation [95 % t-interval]",
            1, cluster, [&](const CellReport& c, const CellReport& one) {
              return one_line(text_of(time_ratio(plan_, report_.results, c.cell, one.cell), "%.2f", 1, plan_.seeds));
            });
  }

  const Plan& plan_;
  const ExperimentReport report_;
  std::string text_;
  bool edges_ = false;
};

}  // namespace

std::string experiment_table(const Plan& plan, const Results& results) { return Tables(plan, results).all(); }

}  // namespace tandem
