// The page of an experiment: one HTML file that needs nothing else.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>

#include "core/error.h"
#include "dist/lab/experiment.h"
#include "layers/export/chart.h"

namespace tandem {
namespace {

std::string text(const char* format, auto... values) {
  char t[160];
  std::snprintf(t, sizeof t, format, values...);
  return t;
}

}  // namespace

std::string experiment_page(const Plan& plan, const Results& results) {
  // Final runs of a strategy and number of workers, by seed.
  using Cell = std::map<std::uint64_t, const Outcome*>;
  std::map<std::pair<std::string, int>, Cell> cells;
  for (const auto& [t, o] : results)
    if (t.final) cells[{t.strategy, t.workers}][t.seed] = &o;
  auto cell = [&](const std::string& strategy, int workers) -> const Cell& { return cells[{strategy, workers}]; };
  auto accuracy = [&](const std::string& strategy, int k) { return test_accuracy(results, strategy, k); };
  std::vector<int> all_workers = plan.workers;
  std::sort(all_workers.begin(), all_workers.end());

  std::string page =
      "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" "
      "content=\"width=device-width, initial-scale=1\">\n<meta name=\"generator\" content=\"Tandem\">\n<title>" +
      html_escaped(plan.title) + "</title>\n<style>\n" + chart_style() +
      "body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif}\n"
      "main{max-width:1180px;margin:0 auto;padding:24px 16px}h1{font-size:24px}h2{font-size:18px;margin-top:32px}\n"
      ".charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(420px,100%),1fr));gap:14px}\n"
      ".charts>div{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:10px}\n"
      ".scroll{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}\n"
      "th,td{padding:4px 8px;text-align:right;border-bottom:1px solid "
      "var(--rule)}th:first-child,td:first-child{text-align:left}\n"
      "td{white-space:nowrap}td.best{font-weight:700}td small{display:block}td small,p{color:var(--soft)}\n</style>\n</head>\n<body>\n<main>\n<h1>" +
      html_escaped(plan.title) + "</h1>\n";
  page += "<p>" + html_escaped(plan.model + " on " + plan.data_set) +
          text(", %s over all workers, batch %d a worker, schedule ", counted(plan.epochs, "epoch").c_str(), plan.batch) +
          html_escaped(plan.schedule) +
          text(", momentum %g, weight decay %g; step times from Gamma(%g). ", plan.momentum, plan.weight_decay,
               plan.shape) +
          text(
              "The learning rate of every strategy and number of workers was chosen on %d pictures held back from "
              "training; ",
              plan.val) +
          text("then %s with other seeds.%s</p>\n", counted(plan.seeds, "run").c_str(),
               plan.strategies.size() > chart_colours ? " Dashed lines: strategies that share a colour with an earlier one." : "");

  // ---- the table ----
  page += "<h2>Test accuracy</h2>\n<div class=\"scroll\"><table>\n<thead><tr><th>workers</th>";
  for (int k : all_workers) page += "<th>" + std::to_string(k) + "</th>";
  page += "</tr></thead>\n<tbody>\n";
  for (const std::string& s : plan.strategies) {
    page += "<tr><td>" + html_escaped(s) + "</td>";
    for (int k : all_workers) {
      const Mean m = accuracy(s, k);
      bool best = m.count > 0;
      for (const std::string& other : plan.strategies)
        if (accuracy(other, k).value > m.value + 1e-9) best = false;
      page += best ? "<td class=\"best\">" : "<td>";
      if (m.count == 0) {
        page += "–</td>";
        continue;
      }
      page += text("%.2f", 100 * m.value) + (m.count > 1 ? text(" ± %.2f", 100 * m.error) : "") + " % <small>η " +
              short_number(chosen_rate(plan, results, s, k), 3) + "</small></td>";
    }
    page += "</tr>\n";
  }
  page +=
      "</tbody></table></div>\n<p>Mean and standard error over seeds; η is the learning rate that was chosen.</p>\n";

  // ---- the first against the others, pair by pair ----
  if (plan.strategies.size() > 1) {
    const std::string& first = plan.strategies[0];
    page += "<h2>" + html_escaped(first) +
            " against each other strategy</h2>\n<div class=\"scroll\"><table>\n<thead><tr><th>workers</th>";
    for (int k : all_workers) page += "<th>" + std::to_string(k) + "</th>";
    page += "</tr></thead>\n<tbody>\n";
    for (std::size_t i = 1; i < plan.strategies.size(); i++) {
      page += "<tr><td>" + html_escaped(plan.strategies[i]) + "</td>";
      for (int k : all_workers) {
        const Mean m = advantage(results, first, plan.strategies[i], k);
        page += m.count == 0 ? "<td>–</td>"
                             : text("<td%s>%+.2f", m.value > 2 * m.error ? " class=\"best\"" : "", 100 * m.value) +
                                   (m.count > 1 ? text(" ± %.2f", 100 * m.error) : "") + "</td>";
      }
      page += "</tr>\n";
    }
    page +=
        "</tbody></table></div>\n<p>Points of accuracy, paired by seed: mean and standard error; bold: better by more "
        "than two.</p>\n";
  }

  // ---- charts ----
  auto line = [&](std::size_t i) {
    return Line{.label = plan.strategies[i],
                .x = {},
                .y = {},
                .colour = int(i),
                .stroke = i < chart_colours ? Line::Stroke::solid : Line::Stroke::dashed};
  };
  auto draw = [&](const Chart& chart) { page += "<div>" + svg_of(chart) + "</div>\n"; };
  page += "<h2>By the number of workers</h2>\n<div class=\"charts\">\n";
  Chart by_workers{.title = "Test accuracy", .x_unit = "workers", .y_unit = "%", .percent = true, .x_powers = true};
  Chart gaps{.title = "Distance to the weights a gradient was made at",
             .x_unit = "workers",
             .y_unit = "",
             .from_zero = true,
             .x_powers = true};
  Chart corrections{.title = "Correction, as a share of the gradient",
                    .x_unit = "workers",
                    .y_unit = "",
                    .from_zero = true,
                    .x_powers = true};
  for (std::size_t i = 0; i < plan.strategies.size(); i++) {
    Line a = line(i), g = line(i), c = line(i);
    for (int k : all_workers) {
      const Mean m = accuracy(plan.strategies[i], k);
      a.x.push_back(std::log2(k)), a.y.push_back(m.value), a.error.push_back(m.error);
      std::vector<double> gap, correction;
      for (const auto& [seed, o] : cell(plan.strategies[i], k))
        gap.push_back(o->gap), correction.push_back(o->correction);
      g.x.push_back(std::log2(k)), g.y.push_back(mean_of(gap).value);
      c.x.push_back(std::log2(k)), c.y.push_back(mean_of(correction).value);
    }
    by_workers.lines.push_back(a);
    auto some = [](const Line& l) { return std::any_of(l.y.begin(), l.y.end(), [](double v) { return v > 0; }); };
    if (some(g)) gaps.lines.push_back(g);
    if (some(c)) corrections.lines.push_back(c);
  }
  draw(by_workers), draw(gaps), draw(corrections);
  page += "</div>\n";

  auto alike = [](const Line& a, const Line& b) {  // histograms: no bar differs by more than two points
    for (std::size_t i = 0; i < std::max(a.y.size(), b.y.size()); i++)
      if (std::abs((i < a.y.size() ? a.y[i] : 0) - (i < b.y.size() ? b.y[i] : 0)) > 0.02) return false;
    return true;
  };
  for (int k : all_workers) {
    if (std::none_of(results.begin(), results.end(), [&](const auto& r) { return r.first.workers == k; })) continue;
    page += "<h2>" + counted(k, "worker") + "</h2>\n<div class=\"charts\">\n";
    Chart by_epoch{.title = "Test accuracy", .x_unit = "epoch", .y_unit = "%", .percent = true, .x_whole = true};
    Chart by_time{.title = "Test accuracy", .x_unit = "seconds of virtual time", .y_unit = "%", .percent = true};
    Chart delays{.title = "Delay of a gradient",
                 .x_unit = "updates",
                 .y_unit = "% of pushes",
                 .note = "strategies that wait for nobody have the same: each is drawn once",
                 .from_zero = true,
                 .percent = true,
                 .x_whole = true};
    Chart grid{.title = "Learning rates tried",
               .x_unit = "learning rate",
               .y_unit = "%",
               .note = "on pictures held back; without what is 25 points below the best",
               .percent = true,
               .x_powers = true};
    double best = 0;
    for (std::size_t i = 0; i < plan.strategies.size(); i++) {
      const Cell& runs = cell(plan.strategies[i], k);
      Line e = line(i), t = line(i), d = line(i), g = line(i);
      std::vector<double> histogram;
      for (const auto& [seed, o] : runs) {
        for (std::size_t j = 0; j < o->accuracies.size(); j++) {
          if (e.x.size() <= j) e.x.push_back(double(j + 1)), e.y.push_back(0), t.x.push_back(0), t.y.push_back(0);
          e.y[j] += o->accuracies[j] / double(runs.size()), t.y[j] += o->accuracies[j] / double(runs.size());
          t.x[j] += o->seconds[j] / double(runs.size());
        }
        if (histogram.size() < o->delays.size()) histogram.resize(o->delays.size());
        for (std::size_t j = 0; j < o->delays.size(); j++) histogram[j] += o->delays[j];
      }
      double all = 0;
      for (double v : histogram) all += v;
      for (std::size_t j = 0; j < histogram.size(); j++) d.x.push_back(double(j)), d.y.push_back(histogram[j] / all);
      std::map<double, std::vector<double>> tried;
      for (const auto& [trial, o] : results)
        if (!trial.final && trial.strategy == plan.strategies[i] && trial.workers == k &&
            trial.epochs == (plan.tuning_epochs ? plan.tuning_epochs : plan.epochs))
          tried[trial.rate].push_back(o.validation);
      for (const auto& [rate, v] : tried) {
        const double mean = mean_of(v).value;
        best = std::max(best, mean);
        g.x.push_back(std::log2(rate)), g.y.push_back(mean);
      }
      by_epoch.lines.push_back(e), by_time.lines.push_back(t), grid.lines.push_back(g);
      const bool late = d.y.size() > 1;  // of who waits for all others nothing is
      if (late && std::none_of(delays.lines.begin(), delays.lines.end(), [&](const Line& l) { return alike(l, d); }))
        delays.lines.push_back(d);
    }
    for (Line& l : grid.lines)
      for (double& y : l.y)
        if (y < best - 0.25) y = NAN;
    draw(by_epoch), draw(by_time);
    if (k > 1) draw(delays);
    draw(grid);
    page += "</div>\n";
  }
  return page + "</main>\n</body>\n</html>\n";
}

}  // namespace tandem
