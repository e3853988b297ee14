// What the final runs of an experiment say in numbers.
#include <algorithm>

#include "core/text.h"
#include "dist/lab/experiment.h"

namespace tandem {
namespace {

std::vector<int> ascending(std::vector<int> v) {
  std::sort(v.begin(), v.end());
  return v;
}

// The pairs of final runs with one seed; `of` gives the value of a pair, or none where it is censored.
template <class Of>
Paired paired(const Plan& plan, const Results& results, const Cell& cell, const Cell& other, const Of& of) {
  const auto a = final_runs(plan, results, cell), b = final_runs(plan, results, other);
  std::vector<double> values;
  Paired p;
  for (const auto& [seed, outcome] : a) {
    const auto same = b.find(seed);
    if (same == b.end()) continue;
    if (const std::optional<double> v = of(*outcome, *same->second))
      values.push_back(*v);
    else
      p.censored++;
  }
  const Mean m = mean_of(values);
  p.pairs = values.size(), p.value = m.value;
  if (p.pairs > 1) p.low = m.value - t_quantile(p.pairs - 1) * m.error, p.high = m.value + t_quantile(p.pairs - 1) * m.error;
  return p;
}

// " (3 of 5; 2 diverged)"; nothing where all planned runs have a value.
std::string censoring(const CensoredMean& c, int planned) {
  if (int(c.mean.count) == planned) return "";
  std::string text = " (" + std::to_string(c.mean.count) + " of " + std::to_string(planned);
  if (c.diverged) text += "; " + std::to_string(c.diverged) + " diverged";
  if (c.not_reached) text += "; " + std::to_string(c.not_reached) + " not reached";
  return text + ")";
}
std::string censoring(const Paired& p, int planned) {
  return int(p.pairs) == planned || p.pairs + p.censored == 0 ? "" : " (" + std::to_string(p.pairs) + " of " + std::to_string(planned) + " pairs)";
}
std::string interval(const Paired& p, const char* form, double unit) {
  if (p.pairs == 0) return "–";
  return printed(form, unit * p.value) + (p.pairs > 1 ? " [" + printed(form, unit * p.low) + ", " + printed(form, unit * p.high) + "]" : "");
}

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
      return c.runs == 0 ? "–" : points(c.mean) + censoring(c, plan_.seeds) + choice(cell);
    });
  }
  void advantages(const std::string& cluster) {
    table("Cluster " + cluster + ": points that " + plan_.strategies[0].text + " is better by, paired by seed [95 % t-interval]", 1, cluster,
          [&](const Cell& cell, const Cell& first) {
            const Paired p = advantage(plan_, results_, first, cell);
            return interval(p, "%+.2f", 100) + censoring(p, plan_.seeds);
          });
  }
  void times(const std::string& cluster) {
    const std::string target = digits(100 * *plan_.target, 4) + " %";
    table("Cluster " + cluster + ": virtual seconds to " + target + ", mean ± standard error over the seeds that reach it", 0, cluster,
          [&](const Cell& cell, const Cell&) {
            const CensoredMean c = time_to_target(plan_, results_, cell);
            if (c.runs == 0) return std::string("–");
            return (c.mean.count ? printed("%.1f", c.mean.value) + (c.mean.count > 1 ? printed(" ± %.1f", c.mean.error) : "") : "–") +
                   censoring(c, plan_.seeds);
          });
    if (plan_.strategies.size() > 1)
      table("Cluster " + cluster + ": time to " + target + " as a multiple of " + plan_.strategies[0].text + "'s, geometric mean over seeds [95 % t-interval]",
            1, cluster, [&](const Cell& cell, const Cell& first) {
              const Paired p = time_ratio(plan_, results_, cell, first);
              return interval(p, "%.2f", 1) + censoring(p, plan_.seeds);
            });
  }

  const Plan& plan_;
  const Results& results_;
  std::vector<int> workers_;
  std::string text_;
  bool edges_ = false;
};

}  // namespace

std::string points(const Mean& m, bool difference) {
  if (m.count == 0) return "–";
  return printed(difference ? "%+.2f" : "%.2f", 100 * m.value) + (m.count > 1 ? printed(" ± %.2f", 100 * m.error) : "");
}

Mean mean_of(const std::vector<double>& values) {
  Mean m;
  m.count = values.size();
  if (values.empty()) return m;
  double sum = 0, squares = 0;
  for (double x : values) sum += x;
  m.value = sum / double(values.size());
  for (double x : values) squares += (x - m.value) * (x - m.value);
  if (values.size() > 1) m.error = std::sqrt(squares / double(values.size() - 1) / double(values.size()));
  return m;
}

double t_quantile(std::size_t n) {
  static constexpr double table[] = {12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281,
                                     2.2010,  2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860};
  if (n == 0) return NAN;
  if (n <= std::size(table)) return table[n - 1];
  const double z = 1.959964, d = double(n);  // Abramowitz and Stegun 26.7.5
  return z + (std::pow(z, 3) + z) / (4 * d) + (5 * std::pow(z, 5) + 16 * std::pow(z, 3) + 3 * z) / (96 * d * d);
}

std::map<std::uint64_t, const Outcome*> final_runs(const Plan& plan, const Results& results, const Cell& cell) {
  std::map<std::uint64_t, const Outcome*> runs;
  const Search s = search(plan, results, cell);
  if (!s.chosen) return runs;
  for (int k = 1; k <= plan.seeds; k++) {
    Trial t = *s.chosen;
    t.seed = std::uint64_t(k);
    if (const auto done = results.find(t); done != results.end()) runs[t.seed] = &done->second;
  }
  return runs;
}

CensoredMean test_accuracy(const Plan& plan, const Results& results, const Cell& cell) {
  CensoredMean c;
  std::vector<double> values;
  for (const auto& [seed, o] : final_runs(plan, results, cell)) {
    c.runs++, c.diverged += o->diverged;
    if (!o->diverged) values.push_back(o->accuracy);
  }
  c.mean = mean_of(values);
  return c;
}

Paired advantage(const Plan& plan, const Results& results, const Cell& cell, const Cell& other) {
  return paired(plan, results, cell, other, [](const Outcome& a, const Outcome& b) {
    return a.diverged || b.diverged ? std::nullopt : std::optional(a.accuracy - b.accuracy);
  });
}

std::optional<double> time_to(double target, const Outcome& o) {
  AccuracyAt before;
  for (const AccuracyAt& e : o.evaluations) {
    if (e.accuracy >= target) {  // before the first evaluation nothing is known: its own time
      if (&e == &o.evaluations[0]) return e.seconds;
      return before.seconds + (e.seconds - before.seconds) * (target - before.accuracy) / (e.accuracy - before.accuracy);
    }
    before = e;
  }
  return {};
}

CensoredMean time_to_target(const Plan& plan, const Results& results, const Cell& cell) {
  CensoredMean c;
  std::vector<double> values;
  for (const auto& [seed, o] : final_runs(plan, results, cell)) {
    c.runs++;
    if (const auto seconds = time_to(*plan.target, *o))
      values.push_back(*seconds);
    else
      (o->diverged ? c.diverged : c.not_reached)++;
  }
  c.mean = mean_of(values);
  return c;
}

Paired time_ratio(const Plan& plan, const Results& results, const Cell& cell, const Cell& other) {
  Paired p = paired(plan, results, cell, other, [&](const Outcome& a, const Outcome& b) -> std::optional<double> {
    const auto one = time_to(*plan.target, a), two = time_to(*plan.target, b);
    if (!one || !two || *one <= 0 || *two <= 0) return {};
    return std::log(*one / *two);
  });
  for (double* v : {&p.value, &p.low, &p.high}) *v = std::exp(*v);
  return p;
}

std::string experiment_table(const Plan& plan, const Results& results) { return Tables(plan, results).all(); }

}  // namespace tandem
