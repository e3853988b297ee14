// The figures of an experiment's page.
#include <algorithm>
#include <cmath>
#include <set>

#include "core/error.h"
#include "core/text.h"
#include "dist/lab/experiment_page.h"
#include "layers/export/chart.h"

namespace tandem {
namespace {

constexpr int reference_colour = chart_colours - 1;  // of all-reduce

std::string of_workers(int k) { return "K = " + std::to_string(k); }

// Where an axis of accuracies begins, so that a few bad values do not squeeze the others: below the best, four times as far as the median,
// and at least 5 points.
double axis_start(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const double best = values.back(), median = values[values.size() / 2];
  return std::max(values[0], best - std::max(0.05, 4 * (best - median)));
}

std::vector<double> final_accuracies(const ExperimentReport& r, const std::string& cluster, const std::vector<int>& workers) {
  std::vector<double> all;
  for (int k : workers)
    for (std::size_t i = 0; i < r.plan.strategies.size(); i++)
      if (const Mean& m = r.at(cluster, k, i).accuracy.mean; m.count) all.push_back(m.value);
  return all;
}

// The first strategy is thick, all-reduce dashed; the others have the group's colours.
Line styled(const ExperimentReport& r, const StrategyGroup& group, std::size_t strategy) {
  Line l{.label = r.label(strategy)};
  if (strategy == 0) {
    l.stroke = Line::Stroke::strong;
  } else if (r.plan.strategies[strategy].text == "all-reduce") {
    l.colour = reference_colour, l.stroke = Line::Stroke::dashed;
  } else {
    const auto place = std::find(group.members.begin(), group.members.end(), strategy) - group.members.begin();
    l.colour = 1 + int(place) % (chart_colours - 2);
    if (place >= chart_colours - 2) l.stroke = Line::Stroke::dotted;
  }
  return l;
}

// A panel for each group; line(strategy, line) fills a line in, chart has what all panels share.
template <class Fill>
std::string panels(const ExperimentReport& r, Chart chart, const Fill& fill) {
  std::string html;
  const std::string title = chart.title;
  for (const StrategyGroup& group : r.groups()) {
    chart.lines.clear(), chart.title = group.name.empty() ? title : group.name;
    std::vector<std::size_t> last_on_top = group.members;
    std::erase(last_on_top, 0u), last_on_top.push_back(0);
    for (std::size_t i = 0; i < r.plan.strategies.size(); i++)
      if (r.plan.strategies[i].text == "all-reduce" && i > 0 && !std::count(last_on_top.begin(), last_on_top.end(), i))
        last_on_top.insert(last_on_top.begin(), i);
    for (std::size_t i : last_on_top) {
      Line l = styled(r, group, i);
      fill(i, l);
      chart.lines.push_back(std::move(l));
    }
    html += "<div>" + svg_of(chart) + "</div>\n";
  }
  return "<div class=\"charts\">\n" + html + "</div>\n";
}

// Mean accuracy over mean time, at evaluations of the same epoch that every run has.
void mean_curve(const Plan& plan, const CellReport& cell, Line& line) {
  std::map<long, std::vector<AccuracyAt>> by_epoch;
  std::size_t runs = 0;
  for (const auto& [seed, o] : cell.runs) {
    if (o->diverged) continue;
    runs++;
    for (const AccuracyAt& e : o->evaluations) {
      auto& same = by_epoch[std::lround(e.epoch / plan.evaluate_every)];
      if (same.size() < runs) same.push_back(e);
    }
  }
  for (const auto& [n, all] : by_epoch) {
    if (all.size() < runs) continue;
    double seconds = 0, accuracy = 0;
    for (const AccuracyAt& e : all) seconds += e.seconds / double(runs), accuracy += e.accuracy / double(runs);
    line.x.push_back(seconds), line.y.push_back(accuracy);
  }
}

// Shares of all pushes of the final runs, by delay.
std::vector<double> delay_shares(const CellReport& cell) {
  std::vector<double> shares;
  double all = 0;
  for (const auto& [seed, o] : cell.runs) {
    shares.resize(std::max(shares.size(), o->delays.size()));
    for (std::size_t d = 0; d < o->delays.size(); d++) shares[d] += o->delays[d], all += o->delays[d];
  }
  for (double& s : shares) s = all > 0 ? s / all : 0;
  return shares;
}

bool alike(const std::vector<double>& a, const std::vector<double>& b) {  // at most 2 % of the pushes are elsewhere
  double difference = 0;
  for (std::size_t i = 0; i < std::max(a.size(), b.size()); i++)
    difference += std::abs((i < a.size() ? a[i] : 0) - (i < b.size() ? b[i] : 0)) / 2;
  return difference <= 0.02;
}

struct DelayGroup {
  std::vector<double> shares;
  std::vector<std::size_t> members;
};
std::vector<DelayGroup> delay_groups(const ExperimentReport& r, const std::string& cluster, int workers) {
  std::vector<DelayGroup> groups;
  for (std::size_t i = 0; i < r.plan.strategies.size(); i++) {
    const auto shares = delay_shares(r.at(cluster, workers, i));
    if (shares.size() < 2) continue;  // nothing is late
    const auto same = std::find_if(groups.begin(), groups.end(), [&](const DelayGroup& g) { return alike(g.shares, shares); });
    if (same != groups.end())
      same->members.push_back(i);
    else
      groups.push_back({shares, {i}});
  }
  return groups;
}

Chart delay_chart(const ExperimentReport& r, const std::vector<DelayGroup>& groups, int workers) {
  Chart chart{.title = of_workers(workers), .x_unit = "delay τ in updates", .y_unit = "% of pushes", .from_zero = true, .percent = true, .x_whole = true};
  chart.dots = false;
  for (std::size_t g = 0; g < groups.size(); g++) {
    Line l{.label = r.label(groups[g].members[0]), .colour = int(g)};
    if (groups[g].members.size() > 1) l.label = l.label + " +" + std::to_string(groups[g].members.size() - 1);
    if (g >= chart_colours) l.stroke = Line::Stroke::dotted;
    double left = 1;
    for (std::size_t d = 0; d < groups[g].shares.size() && left > 0.001; left -= groups[g].shares[d++])
      l.x.push_back(double(d)), l.y.push_back(groups[g].shares[d]);
    chart.lines.push_back(l);
  }
  return chart;
}

std::string members_text(const ExperimentReport& r, const std::vector<DelayGroup>& groups) {
  std::string text;
  for (const DelayGroup& g : groups) {
    if (g.members.size() < 2) continue;
    std::string others;
    for (std::size_t i = 1; i < g.members.size(); i++) others += (others.empty() ? "" : ", ") + r.label(g.members[i]);
    text += " The line of " + r.label(g.members[0]) + " stands also for " + others + ".";
  }
  return text;
}

// ---- the tried points of a search ------------------------------------------------------------------------------------------------
std::set<double> lattice(const std::set<double>& tried, bool doublings) {  // of rates: every doubling between the first and the last
  std::set<double> all = tried;
  if (doublings && !tried.empty())
    for (double v = *tried.begin(); v < *tried.rbegin() * 1.01; v *= 2)
      if (std::none_of(tried.begin(), tried.end(), [&](double t) { return std::abs(t / v - 1) < 1e-6; })) all.insert(v);
  return all;
}

// A map for each number of workers, with the same axes. Of points that differ only in their constants the best is shown.
std::vector<HeatMap> maps_of(const ExperimentReport& r, const std::string& cluster, std::size_t strategy, double low, double high) {
  std::set<double> rates, momenta;
  for (int k : r.workers)
    for (const TriedPoint& p : r.at(cluster, k, strategy).search.tried) rates.insert(p.trial.rate), momenta.insert(p.trial.momentum);
  rates = lattice(rates, true);
  std::vector<HeatMap> maps;
  for (int k : r.workers) {
    const Search& s = r.at(cluster, k, strategy).search;
    if (s.tried.empty()) continue;
    HeatMap map{.title = of_workers(k), .x_unit = "η", .y_unit = r.plan.strategies[strategy].momentum ? "μ" : ""};
    map.low = low, map.high = high;
    for (double v : rates) map.x.push_back(digits(v, 3));
    for (double v : momenta) map.y.push_back(map.y_unit.empty() ? "" : digits(v, 3));
    std::map<std::pair<double, double>, const TriedPoint*> best;
    for (const TriedPoint& p : s.tried) {
      const TriedPoint*& b = best[{p.trial.rate, p.trial.momentum}];
      if (!b || p.score > b->score) b = &p;
    }
    for (const auto& [point, p] : best) {
      HeatMap::Cell c{.x = std::size_t(std::distance(rates.begin(), rates.find(point.first))),
                      .y = std::size_t(std::distance(momenta.begin(), momenta.find(point.second)))};
      if (p->score >= 0) c.value = p->score, c.text = printed("%.1f", 100 * p->score);
      c.tooltip = p->trial.strategy + ", η " + digits(point.first, 4) + ", μ " + digits(point.second, 3) + ": " +
                  (p->score < 0 ? "diverged" : printed("%.2f %%", 100 * p->score));
      c.outlined = s.chosen && s.chosen->rate == point.first && s.chosen->momentum == point.second;
      map.cells.push_back(c);
    }
    maps.push_back(map);
  }
  return maps;
}

}  // namespace

std::string accuracy_figure(const ExperimentReport& r, const std::string& cluster) {
  const std::vector<double> all = final_accuracies(r, cluster, r.workers);
  if (all.empty()) return "";
  Chart chart{.title = "Test accuracy", .x_unit = "workers K", .y_unit = "%", .percent = true, .x_powers = true};
  for (int k : r.workers) chart.x_holds.push_back(std::log2(k));
  chart.y_from = axis_start(all), chart.y_holds = {*std::max_element(all.begin(), all.end())};
  const std::string html = panels(r, chart, [&](std::size_t i, Line& l) {
    for (int k : r.workers) {
      const CensoredMean& a = r.at(cluster, k, i).accuracy;
      if (a.runs > 0 && a.mean.count == 0) l.crosses.push_back(std::log2(k));
      l.x.push_back(std::log2(k)), l.y.push_back(a.mean.value), l.error.push_back(a.mean.error), l.open.push_back(a.diverged > 0);
    }
  });
  return captioned(html,
                   "Test accuracy in % at the end of training against the number of workers K (binary logarithm). Mean over the final runs that did not diverge; bars: ± one "
                   "standard error. Open marker: some seeds diverged; × at the axis: all did; ▽ at the axis: the value lies below the axis.",
                   r.conditions() + r.missing(cluster, r.workers));
}

std::string time_figure(const ExperimentReport& r, const std::string& cluster, int workers) {
  const std::vector<double> all = final_accuracies(r, cluster, {workers});
  if (all.empty()) return "";
  Chart chart{.title = "Test accuracy", .x_unit = "virtual seconds", .y_unit = "%", .percent = true, .dots = false};
  chart.y_from = std::min(axis_start(all), all[0] - 0.1), chart.x_holds = {0};
  const std::string html = panels(r, chart, [&](std::size_t i, Line& l) { mean_curve(r.plan, r.at(cluster, workers, i), l); });
  return captioned(html,
                   of_workers(workers) + ": test accuracy in % against virtual time. Means of both over the final runs that did not diverge, every " +
                       digits(r.plan.evaluate_every, 3) + " epochs.",
                   r.conditions() + r.missing(cluster, {workers}));
}

std::string delay_figure(const ExperimentReport& r, const std::string& cluster) {
  std::string html, also;
  for (int k : r.workers) {
    const auto groups = delay_groups(r, cluster, k);
    if (k == 1 || groups.empty()) continue;
    html += "<div>" + svg_of(delay_chart(r, groups, k)) + "</div>\n";
    if (const std::string text = members_text(r, groups); !text.empty()) also += " " + of_workers(k) + ":" + text;
  }
  if (html.empty()) return "";
  return captioned("<div class=\"charts\">\n" + html + "</div>\n",
                   "Staleness: share of pushes that came τ updates after their worker's pull, over all final runs. Strategies whose histograms differ in at most 2 % of "
                   "the pushes share a line; those in which nothing is late have none. The last 0.1 % of a histogram is cut off.",
                   html_escaped(also) + " " + r.conditions());
}

std::string search_figure(const ExperimentReport& r, const std::string& cluster) {
  std::vector<double> scores;
  for (int k : r.workers)
    for (std::size_t i = 0; i < r.plan.strategies.size(); i++)
      for (const TriedPoint& p : r.at(cluster, k, i).search.tried)
        if (p.score >= 0) scores.push_back(p.score);
  if (scores.empty()) return "";
  const double low = axis_start(scores), high = *std::max_element(scores.begin(), scores.end());
  std::string html;
  for (std::size_t i = 0; i < r.plan.strategies.size(); i++) {
    std::string maps;
    for (const HeatMap& m : maps_of(r, cluster, i, low, high)) maps += svg_of(m);
    if (!maps.empty()) html += "<div class=\"maps\"><h4>" + html_escaped(r.label(i)) + "</h4><div>\n" + maps + "</div></div>\n";
  }
  return captioned(html,
                   printed("The searches: accuracy in %% on held-out pictures of each learning rate η and momentum μ that was tried, with the first tuning seed. Empty: not "
                           "tried; ×: diverged; outlined: chosen (by the mean over all tuning seeds). Of points that differ in a strategy's own constants the best is shown. "
                           "Colour: from %.1f %% or less (faint) to %.1f %% (strong), the same in all maps. The maps of strategies without momentum have one row.",
                           100 * low, 100 * high),
                   r.conditions());
}

std::string ablation_figure(const ExperimentReport& r, const std::string& cluster) {
  std::vector<std::pair<int, DotPlot>> plots;
  std::vector<double> holds;
  for (int k : r.workers) {
    DotPlot plot{.title = of_workers(k), .x_unit = "points of accuracy"};
    for (std::size_t i = 1; i < r.plan.strategies.size(); i++) {
      if (!r.is_ablation(i)) continue;
      const Paired p = advantage(r.plan, r.results, r.at(cluster, k, i).cell, r.at(cluster, k, 0).cell);
      DotPlot::Row row{.label = r.label(i).substr(r.label(i).find(':') + 1), .value = 100 * p.value, .low = 100 * p.low, .high = 100 * p.high};
      row.note = p.pairs ? printed("%+.2f", 100 * p.value) : p.censored ? "diverged" : "–";
      if (p.pairs && p.censored) row.note += printed(" (%zu of %zu)", p.pairs, p.pairs + p.censored);
      for (double x : {row.value, row.low, row.high}) holds.push_back(x);
      plot.rows.push_back(row);
    }
    if (std::any_of(plot.rows.begin(), plot.rows.end(), [](const auto& row) { return row.note != "–"; })) plots.push_back({k, plot});
  }
  if (plots.empty()) return "";
  std::string html;
  for (auto& [k, plot] : plots) plot.x_holds = holds, html += "<div>" + svg_of(plot) + "</div>\n";
  return captioned("<div class=\"charts\">\n" + html + "</div>\n",
                   "Ablations: test accuracy of " + r.plan.strategies[0].text + " with the named switch or constant minus that of the full rule, in points, paired by seed. Bars: 95 % "
                   "t-intervals over the pairs of seeds. Left of 0: worse than the full rule. In parentheses: pairs without a diverged run, of all.",
                   r.conditions() + r.missing(cluster, r.workers));
}

}  // namespace tandem
