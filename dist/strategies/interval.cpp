#include "dist/strategies/interval.h"

#include <algorithm>

#include "core/text.h"

namespace tandem {

std::optional<Interval> Interval::parse(const std::string& text, std::int64_t steps) {
  Interval every{.steps = steps};
  std::string number = text;
  if (const std::string rule = "qsr:"; text.starts_with(rule)) {
    const std::size_t end = std::min(text.find(':', rule.size()), text.size());
    every.alpha = parsed<double>(text.substr(rule.size(), end - rule.size())).value_or(0);
    if (!(every.alpha > 0 && every.alpha < 1e9)) return {};
    if (end == text.size()) return every;
    number = text.substr(end + 1);
  }
  every.steps = parsed<std::int64_t>(number).value_or(0);
  return every.steps >= 1 ? std::optional(every) : std::nullopt;
}

std::string Interval::name() const { return (alpha > 0 ? "qsr:" + digits(alpha) + ":" : "") + std::to_string(steps); }

std::int64_t Interval::at(double rate, std::int64_t step, const RunPlan& plan) const {
  if (alpha == 0) return steps;
  const double total = double(plan.epochs) * plan.steps_per_epoch;
  for (double next = double(step) + 1; plan.learning_rate && next < total && plan.learning_rate(next) > rate; next++)
    rate = plan.learning_rate(next);
  const double root = alpha / rate, most = 1e9;  // longer than any epoch, which an exchange ends
  return std::max(steps, root * root < most ? std::int64_t(root * root) : std::int64_t(most));
}

}  // namespace tandem
