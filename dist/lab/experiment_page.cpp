// The page of an experiment: one HTML file that needs nothing else.
#include <algorithm>
#include <cmath>
#include <map>

#include "core/error.h"
#include "core/text.h"
#include "dist/lab/experiment.h"
#include "layers/export/chart.h"

namespace tandem {
namespace {

const char* const page_style = R"css(body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1180px;margin:0 auto;padding:24px 16px}h1{font-size:24px}h2{font-size:18px;margin-top:32px}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(420px,100%),1fr));gap:14px}
.charts>div{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:10px}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:4px 8px;text-align:right;border-bottom:1px solid var(--rule)}th:first-child,td:first-child{text-align:left}
td{white-space:nowrap}td.best{font-weight:700}td small{display:block}td small,p{color:var(--soft)}
)css";

// Whether no bar of two histograms differs by more than two points.
bool alike(const Line& a, const Line& b) {
  for (std::size_t i = 0; i < std::max(a.y.size(), b.y.size()); i++)
    if (std::abs((i < a.y.size() ? a.y[i] : 0) - (i < b.y.size() ? b.y[i] : 0)) > 0.02) return false;
  return true;
}

// A page while it is written: a method for each part, in their order.
class Page {
 public:
  Page(const Plan& plan, const Results& results) : plan_(plan), results_(results), workers_(plan.workers) {
    std::sort(workers_.begin(), workers_.end());
    for (const auto& [t, o] : results)
      if (t.final) cells_[{t.strategy, t.workers}][t.seed] = &o;
  }

  std::string written() {
    head();
    accuracies();
    advantages();
    html_ += "<h2>By the number of workers</h2>\n<div class=\"charts\">\n";
    by_workers();
    for (int k : workers_) {
      if (std::none_of(results_.begin(), results_.end(), [&](const auto& r) { return r.first.workers == k; })) continue;
      html_ += "<h2>" + counted(k, "worker") + "</h2>\n<div class=\"charts\">\n";
      by_epoch_and_time(k);
      if (k > 1) delays(k);
      rates_tried(k);
      html_ += "</div>\n";
    }
    return html_ + "</main>\n</body>\n</html>\n";
  }

 private:
  using Cell = std::map<std::uint64_t, const Outcome*>;  // by seed

  void head() {
    const std::string title = html_escaped(plan_.title);
    html_ = "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" "
            "content=\"width=device-width, initial-scale=1\">\n<meta name=\"generator\" content=\"Tandem\">\n<title>" +
            title + "</title>\n<style>\n" + chart_style() + page_style + "</style>\n</head>\n<body>\n<main>\n<h1>" + title + "</h1>\n";
    html_ += "<p>" + html_escaped(plan_.model + " on " + plan_.data_set) +
             printed(", %s over all workers, batch %d a worker, schedule ", counted(plan_.epochs, "epoch").c_str(), plan_.batch) +
             html_escaped(plan_.schedule) +
             printed(", momentum %g, weight decay %g; step times from Gamma(%g). The learning rate of every strategy and number of "
                     "workers was chosen on %d pictures held back from training; then %s with other seeds.%s</p>\n",
                     plan_.momentum, plan_.weight_decay, plan_.shape, plan_.val, counted(plan_.seeds, "run").c_str(),
                     plan_.strategies.size() > chart_colours ? " Dashed lines: strategies that share a colour with an earlier one." : "");
  }

  // A table with a column for each number of workers; cell(strategy, workers) is "<td>…</td>".
  void table(const std::string& title, std::size_t first, const auto& cell, const std::string& note) {
    html_ += "<h2>" + title + "</h2>\n<div class=\"scroll\"><table>\n<thead><tr><th>workers</th>";
    for (int k : workers_) html_ += "<th>" + std::to_string(k) + "</th>";
    html_ += "</tr></thead>\n<tbody>\n";
    for (std::size_t i = first; i < plan_.strategies.size(); i++) {
      html_ += "<tr><td>" + html_escaped(plan_.strategies[i]) + "</td>";
      for (int k : workers_) html_ += cell(plan_.strategies[i], k);
      html_ += "</tr>\n";
    }
    html_ += "</tbody></table></div>\n<p>" + note + "</p>\n";
  }

  void accuracies() {
    auto cell = [&](const std::string& s, int k) -> std::string {
      const Mean m = test_accuracy(results_, s, k);
      if (m.count == 0) return "<td>–</td>";
      const bool best = std::none_of(plan_.strategies.begin(), plan_.strategies.end(), [&](const std::string& other) {
        return test_accuracy(results_, other, k).value > m.value + 1e-9;
      });
      return (best ? "<td class=\"best\">" : "<td>") + points(m) + " % <small>η " + short_number(chosen_rate(plan_, results_, s, k), 3) +
             "</small></td>";
    };
    table("Test accuracy", 0, cell, "Mean and standard error over seeds; η is the learning rate that was chosen.");
  }

  void advantages() {
    if (plan_.strategies.size() < 2) return;
    const std::string& first = plan_.strategies[0];
    auto cell = [&](const std::string& s, int k) {
      const Mean m = advantage(results_, first, s, k);
      return (m.value > 2 * m.error ? "<td class=\"best\">" : "<td>") + points(m, true) + "</td>";
    };
    table(html_escaped(first) + " against each other strategy", 1, cell,
          "Points of accuracy, paired by seed: mean and standard error; bold: better by more than two.");
  }

  void by_workers() {
    Chart accuracy{.title = "Test accuracy", .x_unit = "workers", .y_unit = "%", .percent = true, .x_powers = true};
    Chart gaps{.title = "Distance to the weights a gradient was made at", .x_unit = "workers", .y_unit = "",
               .from_zero = true, .x_powers = true};
    Chart corrections{.title = "Correction, as a share of the gradient", .x_unit = "workers", .y_unit = "",
                      .from_zero = true, .x_powers = true};
    for (std::size_t i = 0; i < plan_.strategies.size(); i++) {
      Line a = line(i), g = line(i), c = line(i);
      for (int k : workers_) {
        const Mean m = test_accuracy(results_, plan_.strategies[i], k);
        std::vector<double> gap, correction;
        for (const auto& [seed, o] : cell(i, k)) gap.push_back(o->gap), correction.push_back(o->correction);
        for (Line* l : {&a, &g, &c}) l->x.push_back(std::log2(k));
        a.y.push_back(m.value), a.error.push_back(m.error);
        g.y.push_back(mean_of(gap).value), c.y.push_back(mean_of(correction).value);
      }
      auto some = [](const Line& l) { return std::any_of(l.y.begin(), l.y.end(), [](double v) { return v > 0; }); };
      accuracy.lines.push_back(a);
      if (some(g)) gaps.lines.push_back(g);
      if (some(c)) corrections.lines.push_back(c);
    }
    draw(accuracy), draw(gaps), draw(corrections);
    html_ += "</div>\n";
  }

  void by_epoch_and_time(int k) {
    Chart by_epoch{.title = "Test accuracy", .x_unit = "epoch", .y_unit = "%", .percent = true, .x_whole = true};
    Chart by_time{.title = "Test accuracy", .x_unit = "seconds of virtual time", .y_unit = "%", .percent = true};
    for (std::size_t i = 0; i < plan_.strategies.size(); i++) {
      const Cell& runs = cell(i, k);
      Line e = line(i), t = line(i);
      for (const auto& [seed, o] : runs)
        for (std::size_t j = 0; j < o->accuracies.size(); j++) {
          if (e.x.size() <= j) e.x.push_back(double(j + 1)), e.y.push_back(0), t.x.push_back(0);
          e.y[j] += o->accuracies[j] / double(runs.size()), t.x[j] += o->seconds[j] / double(runs.size());
        }
      t.y = e.y;
      by_epoch.lines.push_back(e), by_time.lines.push_back(t);
    }
    draw(by_epoch), draw(by_time);
  }

  void delays(int k) {
    Chart chart{.title = "Delay of a gradient", .x_unit = "updates", .y_unit = "% of pushes",
                .note = "strategies that wait for nobody have the same: each is drawn once",
                .from_zero = true, .percent = true, .x_whole = true};
    for (std::size_t i = 0; i < plan_.strategies.size(); i++) {
      Line d = line(i);
      std::vector<double> histogram;
      double all = 0;
      for (const auto& [seed, o] : cell(i, k)) {
        if (histogram.size() < o->delays.size()) histogram.resize(o->delays.size());
        for (std::size_t j = 0; j < o->delays.size(); j++) histogram[j] += o->delays[j];
      }
      for (double v : histogram) all += v;
      for (std::size_t j = 0; j < histogram.size(); j++) d.x.push_back(double(j)), d.y.push_back(histogram[j] / all);
      const bool late = d.y.size() > 1;  // of who waits for all others nothing is
      if (late && std::none_of(chart.lines.begin(), chart.lines.end(), [&](const Line& l) { return alike(l, d); }))
        chart.lines.push_back(d);
    }
    draw(chart);
  }

  void rates_tried(int k) {
    Chart chart{.title = "Learning rates tried", .x_unit = "learning rate", .y_unit = "%",
                .note = "on pictures held back; without what is 25 points below the best", .percent = true, .x_powers = true};
    double best = 0;
    for (std::size_t i = 0; i < plan_.strategies.size(); i++) {
      Line g = line(i);
      std::map<double, std::vector<double>> tried;
      for (const auto& [trial, o] : results_)
        if (!trial.final && trial.strategy == plan_.strategies[i] && trial.workers == k &&
            trial.epochs == (plan_.tuning_epochs ? plan_.tuning_epochs : plan_.epochs))
          tried[trial.rate].push_back(o.validation);
      for (const auto& [rate, v] : tried) g.x.push_back(std::log2(rate)), g.y.push_back(mean_of(v).value);
      for (double y : g.y) best = std::max(best, y);
      chart.lines.push_back(g);
    }
    for (Line& l : chart.lines)
      for (double& y : l.y)
        if (y < best - 0.25) y = NAN;
    draw(chart);
  }

  const Cell& cell(std::size_t strategy, int workers) { return cells_[{plan_.strategies[strategy], workers}]; }
  Line line(std::size_t i) const {
    return {.label = plan_.strategies[i], .x = {}, .y = {}, .colour = int(i),
            .stroke = i < chart_colours ? Line::Stroke::solid : Line::Stroke::dashed};
  }
  void draw(const Chart& chart) { html_ += "<div>" + svg_of(chart) + "</div>\n"; }

  const Plan& plan_;
  const Results& results_;
  std::vector<int> workers_;                              // ascending
  std::map<std::pair<std::string, int>, Cell> cells_;  // final runs, by strategy and number of workers
  std::string html_;
};

}  // namespace

std::string experiment_page(const Plan& plan, const Results& results) { return Page(plan, results).written(); }

}  // namespace tandem
