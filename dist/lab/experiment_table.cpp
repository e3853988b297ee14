// What the final runs of an experiment say in numbers.
#include <algorithm>

#include "core/text.h"
#include "dist/lab/experiment.h"

namespace tandem {

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

Mean test_accuracy(const Results& results, const std::string& strategy, int workers) {
  std::vector<double> all;
  for (const auto& [t, o] : results)
    if (t.final && t.strategy == strategy && t.workers == workers) all.push_back(o.test);
  return mean_of(all);
}

Mean advantage(const Results& results, const std::string& strategy, const std::string& other, int workers) {
  std::vector<double> differences;
  for (const auto& [t, o] : results)
    for (const auto& [u, p] : results)
      if (t.final && u.final && t.strategy == strategy && u.strategy == other && t.workers == workers &&
          u.workers == workers && t.seed == u.seed)
        differences.push_back(o.test - p.test);
  return mean_of(differences);
}

std::string experiment_table(const Plan& plan, const Results& results) {
  std::vector<int> workers = plan.workers;
  std::sort(workers.begin(), workers.end());
  std::string head = "| workers |", rule = "|---|", table;
  for (int k : workers) head += " " + std::to_string(k) + " |", rule += "---|";
  table = "Test accuracy in %, mean ± standard error over seeds (learning rate)\n\n" + head + "\n" + rule + "\n";
  for (const std::string& s : plan.strategies) {
    table += "| " + s + " |";
    for (int k : workers) {
      const Mean m = test_accuracy(results, s, k);
      table += " " + points(m) + (m.count ? " (" + digits(chosen_rate(plan, results, s, k), 3) + ")" : "") + " |";
    }
    table += "\n";
  }
  if (plan.strategies.size() < 2) return table;
  table += "\nPoints that " + plan.strategies[0] + " is better by, paired by seed\n\n" + head + "\n" + rule + "\n";
  for (std::size_t i = 1; i < plan.strategies.size(); i++) {
    table += "| " + plan.strategies[i] + " |";
    for (int k : workers)
      table += " " + points(advantage(results, plan.strategies[0], plan.strategies[i], k), true) + " |";
    table += "\n";
  }
  return table;
}

}  // namespace tandem
