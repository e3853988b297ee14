// What the final runs of an experiment say in numbers, and how these are written.
#include "core/text.h"
#include "dist/lab/experiment.h"

namespace tandem {
namespace {

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
  p.pairs = values.size();
  p.value = m.value;
  if (p.pairs > 1) {
    p.low = m.value - t_quantile(p.pairs - 1) * m.error;
    p.high = m.value + t_quantile(p.pairs - 1) * m.error;
  }
  return p;
}

}  // namespace

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
    c.runs++;
    c.diverged += o->diverged;
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

static bool at_first(double target, const Outcome& o) {
  return !o.evaluations.empty() && o.evaluations[0].accuracy >= target;
}

std::optional<double> time_to(double target, const Outcome& o) {
  AccuracyAt before;
  for (const AccuracyAt& e : o.evaluations) {
    if (e.accuracy >= target) {  // before the first evaluation nothing is known: its own time
      if (&e == &o.evaluations[0]) return e.seconds;
      return before.seconds +
             (e.seconds - before.seconds) * (target - before.accuracy) / (e.accuracy - before.accuracy);
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
      values.push_back(*seconds), c.at_first += at_first(*plan.target, *o);
    else
      (o->diverged ? c.diverged : c.not_reached)++;
  }
  c.mean = mean_of(values);
  return c;
}

Paired time_ratio(const Plan& plan, const Results& results, const Cell& cell, const Cell& other) {
  Paired p = paired(plan, results, cell, other, [&](const Outcome& a, const Outcome& b) -> std::optional<double> {
    const auto one = time_to(*plan.target, a), two = time_to(*plan.target, b);
    if (!one || !two || at_first(*plan.target, a) || at_first(*plan.target, b)) return {};
    return std::log(*one / *two);
  });
  for (double* v : {&p.value, &p.low, &p.high}) *v = std::exp(*v);
  return p;
}

// ---- as text --------------------------------------------------------------------------------------------------------
static std::string text_of(const Mean& m, const char* form, double unit) {
  if (m.count == 0) return "–";
  return printed(form, unit * m.value) + (m.count > 1 ? " ± " + printed(form, unit * m.error) : "");
}
std::string points(const Mean& m) { return text_of(m, "%.2f", 100); }
std::string seconds_text(const Mean& m) { return text_of(m, "%.1f", 1); }
std::string target_text(const Plan& plan) { return digits(100 * *plan.target, 4) + " %"; }

std::string censored_text(const CensoredMean& c, int planned) {
  std::string text;
  auto add = [&](std::size_t n, const char* what) {
    if (n) text += (text.empty() ? "" : ", ") + std::to_string(n) + " of " + std::to_string(planned) + what;
  };
  add(c.diverged, " diverged"), add(c.not_reached, " not reached");
  add(c.at_first, " at the first evaluation"), add(std::size_t(planned) - c.runs, " not run");
  return text;
}

PairedText text_of(const Paired& p, const char* form, double unit, int planned) {
  PairedText text{p.pairs ? printed(form, unit * p.value) : "–", "", ""};
  if (p.pairs > 1) text.interval = "[" + printed(form, unit * p.low) + ", " + printed(form, unit * p.high) + "]";
  if (p.pairs + p.censored > 0 && int(p.pairs) != planned) text.pairs = printed("%zu of %d pairs", p.pairs, planned);
  return text;
}

}  // namespace tandem
