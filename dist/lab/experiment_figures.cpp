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

constexpr double faint = 0.04;  // of a map of the searches: so far below its best the colour is faintest
constexpr int reference_colour = chart_colours - 1;  // of all-reduce

std::string of_workers(int k) { return "K = " + std::to_string(k); }

// Where an axis of accuracies begins, so that a few bad values do not squeeze the others: below the best, four times as
// far as the median, and at least 5 points.
double axis_start(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const double best = values.back(), median = values[values.size() / 2];
  return std::max(values[0], best - std::max(0.05, 4 * (best - median)));
}

std::vector<double> final_accuracies(const ExperimentReport& r, const std::string& cluster,
                                     const std::vector<int>& workers) {
  std::vector<double> all;
  for (int k : workers)
    for (std::size_t i = 0; i < r.plan.strategies.size(); i++)
      if (const Mean& m = r.at(cluster, k, i).accuracy.mean; m.count) all.push_back(m.value);
  return all;
}

// The first strategy is thick, all-reduce dashed; the others have the group's colours.
Line styled(const ExperimentReport& r, const StrategyGroup& group, std::size_t strategy) {
  Line l{.label = r.is_ablation(strategy) && !group.name.empty() ? r.change(strategy) : r.label(strategy)};
  if (strategy == 0) {
    l.stroke = Line::Stroke::strong;
  } else if (r.plan.strategies[strategy].text == "all-reduce") {
    l.colour = reference_colour;
    l.stroke = Line::Stroke::dashed;
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
  return html;
}
std::string grid(const std::string& panels) { return "<div class=\"charts\">\n" + panels + "</div>\n"; }

// Mean accuracy over mean time, at evaluations of the same epoch that every run has. Runs that end at the target have
// their mean time to it as the last point.
void mean_curve(const Plan& plan, const CellReport& cell, Line& line) {
  std::map<long, std::map<std::uint64_t, AccuracyAt>> by_epoch;
  std::size_t runs = 0;
  for (const auto& [seed, o] : cell.runs) {
    if (o->diverged) continue;
    runs++;
    for (const AccuracyAt& e : o->evaluations)
      by_epoch[std::lround(e.epoch / plan.evaluate_every)].try_emplace(seed, e);
  }
  const bool all_reach = plan.by_time && runs > 0 && cell.time.mean.count == cell.runs.size();
  for (const auto& [n, all] : by_epoch) {
    if (all.size() < runs) continue;
    double seconds = 0, accuracy = 0;
    for (const auto& [seed, e] : all) seconds += e.seconds / double(runs), accuracy += e.accuracy / double(runs);
    if (all_reach && seconds >= cell.time.mean.value) break;
    line.x.push_back(seconds), line.y.push_back(accuracy);
  }
  if (all_reach) line.x.push_back(cell.time.mean.value), line.y.push_back(*plan.target);
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
double participation(const CellReport& cell) {
  std::vector<double> all;
  for (const auto& [seed, o] : cell.runs) all.push_back(o->participation);
  return all.empty() ? 1 : mean_of(all).value;
}

// ---- the tried points of a search -----------------------------------------------------------------------------------
std::set<double> lattice(const std::set<double>& tried,
                         bool doublings) {  // of rates: every doubling between the first and the last
  std::set<double> all = tried;
  if (doublings && !tried.empty())
    for (double v = *tried.begin(); v < *tried.rbegin() * 1.01; v *= 2)
      if (std::none_of(tried.begin(), tried.end(), [&](double t) { return std::abs(t / v - 1) < 1e-6; })) all.insert(v);
  return all;
}

std::string short_rate(double v) {
  if (v >= 0.001) return digits(v, 2);
  const int power = int(std::floor(std::log10(v) + 1e-9));
  return printed("%.1fe%d", v / std::pow(10, power), power);
}

// "54.3", percent, or "27 s" to the target.
std::string score_text(const TriedPoint& p) {
  return p.seconds ? printed("%.0f s", *p.seconds) : printed("%.1f", 100 * p.score);
}

// A map for each number of workers, with the same axes. Of points that differ only in their constants the best is
// shown.
std::vector<HeatMap> maps_of(const ExperimentReport& r, const std::string& cluster, std::size_t strategy) {
  std::set<double> rates, momenta;
  for (int k : r.workers)
    for (const TriedPoint& p : r.at(cluster, k, strategy).search.tried)
      rates.insert(p.trial.rate), momenta.insert(p.trial.momentum);
  rates = lattice(rates, true);
  std::vector<HeatMap> maps;
  for (int k : r.workers) {
    const Search& s = r.at(cluster, k, strategy).search;
    if (s.tried.empty()) continue;
    HeatMap map{.title = of_workers(k), .x_unit = "η", .y_unit = r.plan.strategies[strategy].momentum ? "μ" : ""};
    map.high = 0;
    for (const TriedPoint& p : s.tried) map.high = std::max(map.high, p.score);
    map.low = map.high - faint;
    for (double v : rates) map.x.push_back(short_rate(v));
    for (double v : momenta) map.y.push_back(map.y_unit.empty() ? "" : digits(v, 3));
    std::map<std::pair<double, double>, const TriedPoint*> best;
    for (const TriedPoint& p : s.tried) {
      const TriedPoint*& b = best[{p.trial.rate, p.trial.momentum}];
      if (!b || p.score > b->score) b = &p;
    }
    for (const auto& [point, p] : best) {
      HeatMap::Cell c{.x = std::size_t(std::distance(rates.begin(), rates.find(point.first))),
                      .y = std::size_t(std::distance(momenta.begin(), momenta.find(point.second)))};
      if (p->score >= 0) c.value = p->score, c.text = score_text(*p);
      c.tooltip = p->trial.strategy + ", η " + digits(point.first, 4) + ", μ " + digits(point.second, 3) + ": " +
                  (p->score < 0 ? "diverged" : score_text(*p) + (p->seconds ? "" : " %"));
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
  const double from = axis_start(all);
  chart.y_from = from;
  for (int k : r.workers)  // error bars of what is above the axis are whole
    for (std::size_t i = 0; i < r.plan.strategies.size(); i++)
      if (const Mean& m = r.at(cluster, k, i).accuracy.mean; m.count > 1 && m.value >= from)
        chart.y_from = std::min(*chart.y_from, m.value - m.error);
  chart.y_holds = {*chart.y_from, *std::max_element(all.begin(), all.end())};
  const std::string html = panels(r, chart, [&](std::size_t i, Line& l) {
    for (int k : r.workers) {
      const CensoredMean& a = r.at(cluster, k, i).accuracy;
      if (a.runs > 0 && a.mean.count == 0) l.crosses.push_back(std::log2(k));
      l.x.push_back(std::log2(k)), l.y.push_back(a.mean.value), l.error.push_back(a.mean.error),
          l.open.push_back(a.diverged > 0);
    }
  });
  return captioned(
      grid(html),
      "Test accuracy in % at the end of training against the number of workers K (binary logarithm). Mean over the "
      "final runs that did not diverge; bars: ± one "
      "standard error. Open marker: some seeds diverged; × at the axis: all did; ▽ at the axis: the value lies below "
      "the axis.",
      r.conditions() + r.missing(cluster, r.workers));
}

std::string time_figures(const ExperimentReport& r, const std::string& cluster) {
  auto figure = [&](const std::string& html, const std::vector<int>& workers) {
    return html.empty() ? ""
                        : captioned(grid(html),
                                    (workers.size() == 1 ? of_workers(workers[0]) + ": test" : std::string("Test")) +
                                        " accuracy in % against "
                                        "virtual time. Means of both over the final runs that did "
                                        "not diverge, every " +
                                        digits(r.plan.evaluate_every, 3) + " epochs" +
                                        (r.plan.by_time ? "; where every run reaches the target, the last point is the "
                                                          "mean time to it; otherwise a curve ends "
                                                          "at the last evaluation that all its runs have"
                                                        : "") +
                                        ". A label without a curve: the curve "
                                        "stays below the axis, or is a single point.",
                                    r.conditions() + r.missing(cluster, workers));
  };
  std::string figures, together;  // together: with one group of strategies
  for (int k : r.workers) {
    const std::vector<double> all = final_accuracies(r, cluster, {k});
    if (all.empty()) continue;
    Chart chart{.title = of_workers(k), .x_unit = "virtual seconds", .y_unit = "%", .percent = true, .dots = false};
    const double best = *std::max_element(all.begin(), all.end());
    chart.y_from = std::min(axis_start(all), best - 0.1);
    chart.y_holds = {*chart.y_from, best};
    chart.x_holds = {0};
    const std::string html =
        panels(r, chart, [&](std::size_t i, Line& l) { mean_curve(r.plan, r.at(cluster, k, i), l); });
    if (r.groups().size() == 1)
      together += html;
    else
      figures += "<h4>" + of_workers(k) + "</h4>\n" + figure(html, {k});
  }
  return figures + figure(together, r.workers);
}

std::vector<std::vector<std::size_t>> delay_groups(const ExperimentReport& r, const std::string& cluster) {
  std::vector<std::vector<std::size_t>> groups;
  for (std::size_t i = 0; i < r.plan.strategies.size(); i++) {
    if (std::all_of(r.workers.begin(), r.workers.end(), [&](int k) { return r.at(cluster, k, i).runs.empty(); }))
      continue;
    auto same = [&](const std::vector<std::size_t>& group) {
      return std::all_of(r.workers.begin(), r.workers.end(), [&](int k) {
        const CellReport &a = r.at(cluster, k, i), &b = r.at(cluster, k, group[0]);
        return alike(delay_shares(a), delay_shares(b)) && std::abs(participation(a) - participation(b)) < 0.005;
      });
    };
    if (const auto group = std::find_if(groups.begin(), groups.end(), same); group != groups.end())
      group->push_back(i);
    else
      groups.push_back({i});
  }
  return groups;
}

std::string delay_figure(const ExperimentReport& r, const std::string& cluster) {
  const auto groups = delay_groups(r, cluster);
  std::string html, also;
  for (int k : r.workers) {
    Chart chart{.title = of_workers(k),
                .x_unit = "delay τ in updates",
                .y_unit = "% of pushes",
                .from_zero = true,
                .percent = true,
                .x_whole = true};
    chart.dots = false;
    for (std::size_t g = 0; g < groups.size(); g++) {
      const auto shares = delay_shares(r.at(cluster, k, groups[g][0]));
      if (shares.size() < 2) continue;  // nothing is late
      Line l{.label = r.group_label(groups[g]), .colour = int(g)};
      if (g >= chart_colours) l.stroke = Line::Stroke::dotted;
      double left = 1;
      for (std::size_t d = 0; d < shares.size() && left > 0.001; left -= shares[d++])
        l.x.push_back(double(d)), l.y.push_back(shares[d]);
      chart.lines.push_back(l);
    }
    if (!chart.lines.empty()) html += "<div>" + svg_of(chart) + "</div>\n";
  }
  for (const auto& group : groups) {
    if (group.size() < 2) continue;
    also += (also.empty() ? "" : "; ") + r.group_label(group) + ": also";
    for (std::size_t i = 1; i < group.size(); i++) also += (i > 1 ? ", " : " ") + r.label(group[i]);
  }
  if (html.empty()) return "";
  return captioned(
      grid(html),
      "Staleness: share of pushes that came τ updates after their worker's pull, over all final runs. Strategies whose "
      "histograms differ in at most 2 % of "
      "the pushes at every K share a line; those in which nothing is late have none. The last 0.1 % of a histogram is "
      "cut off. " +
          also + (also.empty() ? "" : "."),
      r.conditions());
}

std::string search_figure(const ExperimentReport& r, const std::string& cluster) {
  std::string html;
  for (std::size_t i = 0; i < r.plan.strategies.size(); i++) {
    std::string maps;
    for (const HeatMap& m : maps_of(r, cluster, i)) maps += svg_of(m);
    if (!maps.empty())
      html += "<div class=\"maps\"><h4>" + html_escaped(r.label(i)) + "</h4><div>\n" + maps + "</div></div>\n";
  }
  if (html.empty()) return "";
  return captioned(
      html,
      printed(
          "The searches: %s on held-out pictures of each learning rate η and momentum μ that was "
          "tried, with the first tuning seed. Empty: not "
          "tried; ×: diverged; outlined: chosen (by the mean over all tuning seeds). Colour: distance to the best "
          "of the map, from 0 (strong) to %g points or more (faint). "
          "Of points that differ in a strategy's own constants the best is shown. Rules without momentum have one row.",
          r.plan.by_time ? "seconds to the target, or accuracy in % where it was missed," : "accuracy in %",
          100 * faint),
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
      DotPlot::Row row{.label = r.change(i), .value = 100 * p.value, .low = 100 * p.low, .high = 100 * p.high};
      row.note = p.pairs ? printed("%+.2f", 100 * p.value) : p.censored ? "diverged" : "–";
      if (p.pairs && p.censored) row.note += printed(" (%zu of %zu)", p.pairs, p.pairs + p.censored);
      for (double x : {row.value, row.low, row.high}) holds.push_back(x);
      plot.rows.push_back(row);
    }
    if (std::any_of(plot.rows.begin(), plot.rows.end(), [](const auto& row) { return row.note != "–"; }))
      plots.push_back({k, plot});
  }
  if (plots.empty()) return "";
  std::string html;
  for (auto& [k, plot] : plots) plot.x_holds = holds, html += "<div>" + svg_of(plot) + "</div>\n";
  return captioned(
      grid(html),
      "Ablations: test accuracy of " + r.plan.strategies[0].text +
          " with the named switch or constant minus that of "
          "the full rule, in points, paired by seed. Bars: 95 % "
          "t-intervals over the pairs of seeds. Left of 0: worse than the full rule. In parentheses: pairs without a "
          "diverged run, of all.",
      r.conditions() + r.missing(cluster, r.workers, true));
}

}  // namespace tandem
