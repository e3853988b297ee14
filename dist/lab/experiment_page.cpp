// The page of an experiment: one HTML file that needs nothing else. Its head and its tables.
#include <algorithm>
#include <cmath>
#include <map>

#include "core/error.h"
#include "core/text.h"
#include "dist/lab/experiment_page.h"
#include "layers/export/chart.h"

namespace tandem {
namespace {

const char* const page_style =
    R"css(body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1180px;margin:0 auto;padding:24px 16px}h1{font-size:24px}h2{font-size:20px;margin-top:40px}h3{font-size:16px;margin:28px 0 8px}
h4{font-size:14px;margin:0 0 4px}nav a{margin-right:14px}a{color:var(--c0)}
figure{margin:0 0 20px}figcaption{color:var(--soft);font-size:13px;max-width:980px;margin-top:8px}figcaption span{color:var(--ink)}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(350px,100%),1fr));gap:12px}
.charts>div,.maps{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:10px;min-width:0}
.charts>div{max-width:600px}.maps{margin-bottom:10px}.maps>div{display:flex;flex-wrap:wrap;gap:6px 20px}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:4px 9px;text-align:right;border-bottom:1px solid var(--rule);vertical-align:top}th:first-child,td:first-child{text-align:left}
td{white-space:nowrap}td.best{font-weight:700}td small{display:block;color:var(--soft);font-weight:400}
td:first-child{position:sticky;left:0;background:var(--page)}
@media (max-width:600px){th,td{padding:4px 6px;font-size:13px}td:first-child{white-space:normal;overflow-wrap:break-word;max-width:110px}}
@media print{:root{--page:#fff}body{font-size:11px}main{max-width:none;padding:0}nav{display:none}
h2{break-before:page}h2.first{break-before:auto}h2,h3,h4{break-after:avoid}
.charts{grid-template-columns:repeat(2,1fr)}
figure:has(.charts),.charts>div,.maps,tr,figcaption{break-inside:avoid}
figcaption{break-before:avoid;font-size:10px}.maps{padding:4px}.maps svg{zoom:.8}
.scroll{overflow:visible}table{font-size:9.5px}th,td{padding:2px 4px}td{white-space:normal}td:first-child{position:static;overflow-wrap:anywhere}}
)css";

const char* const censored_times =
    "‡ Runs that do not reach it are not in the mean, which is too favourable then. For a run that is there at its "
    "first evaluation the time of that evaluation counts, which is too long.";

std::string marked(const std::string& censored) { return censored.empty() ? "" : censored + " ‡"; }
std::string small(const std::string& text) { return text.empty() ? "" : "<small>" + html_escaped(text) + "</small>"; }

std::string breakable(const std::string& html) {  // before : and +
  std::string out;
  for (char c : html) out += (c == ':' || c == '+' ? "<wbr/>" : "") + std::string(1, c);
  return out;
}

std::string cluster_text(const PlannedCluster& c) {
  std::string text =
      c.shape > 0 ? printed("Step times from a Gamma distribution of shape %g", c.shape) : "All step times equal";
  if (c.slow_share > 0)
    text += printed(", the last %g %% of the workers %g times as slow", 100 * c.slow_share, c.slow_factor);
  if (c.latency > 0) text += printed(", latency %g s", c.latency);
  return text + (c.bandwidth > 0 ? ", links of " + readable_bytes(c.bandwidth) + " a second"
                                 : ", links of unlimited bandwidth");
}

class Page {
 public:
  Page(const Plan& plan, const Results& results) : plan_(plan), report_(plan, results) {}

  std::string written() {
    head();
    regimes();
    for (const PlannedCluster& c : plan_.clusters) {
      const std::string name = html_escaped(c.name);
      const auto number = &c - &plan_.clusters[0];
      html_ += std::string("<h2") + (number == 0 && !plan_.by_time ? " class=\"first\"" : "") + " id=\"cluster" +
               std::to_string(number) + "\">Cluster " + name + "</h2>\n<p>" + html_escaped(cluster_text(c)) + ".</p>\n";
      if (std::none_of(report_.results.begin(), report_.results.end(),
                       [&](const auto& run) { return run.first.cluster == c.name; })) {
        html_ += "<p>No run has been made.</p>\n";
        continue;
      }
      accuracies(c.name);
      if (!plan_.by_time) {  // its runs end at one accuracy
        section("Accuracy and the number of workers", accuracy_figure(report_, c.name));
        if (plan_.strategies.size() > 1) advantages(c.name);
        section("Ablations", ablation_figure(report_, c.name));
      }
      section("Accuracy and virtual time", time_figures(report_, c.name));
      if (plan_.target) times(c.name);
      section("Staleness", delay_figure(report_, c.name));
      participation(c.name);
      section("The searches", search_figure(report_, c.name));
    }
    return html_ + "</main>\n</body>\n</html>\n";
  }

 private:
  void head() {
    const std::string title = html_escaped(plan_.title);
    html_ =
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" "
        "content=\"width=device-width, initial-scale=1\">\n<meta name=\"generator\" content=\"Tandem\">\n<title>" +
        title + "</title>\n<style>\n" + chart_style() + page_style + "</style>\n</head>\n<body>\n<main>\n<h1>" + title +
        "</h1>\n";
    std::map<std::string, int> made_by;  // runs by version and CPU
    std::size_t final = 0;
    for (const auto& [t, o] : report_.results) {
      final += t.final;
      if (!o.made_by.empty()) made_by[o.made_by]++;
    }
    html_ += "<p>" + report_.conditions() +
             printed(" Simulated runs on a virtual clock: %zu, of which %zu final. Made by: ", report_.results.size(),
                     final);
    std::string by;
    for (const auto& [m, runs] : made_by)
      by += (by.empty() ? "" : "; ") + m + (made_by.size() > 1 ? ": " + counted(runs, "run") : "");
    html_ += html_escaped(by.empty() ? "–" : by) + ".</p>\n";
    if (plan_.clusters.size() < 2) return;
    html_ += "<nav>";
    for (std::size_t i = 0; i < plan_.clusters.size(); i++)
      html_ += "<a href=\"#cluster" + std::to_string(i) + "\">Cluster " + html_escaped(plan_.clusters[i].name) + "</a>";
    html_ += "</nav>\n";
  }

  // Which method is the fastest on which cluster: a table for each number of workers.
  void regimes() {
    if (!plan_.by_time || plan_.clusters.size() < 2) return;
    std::vector<std::string> names;
    for (const PlannedCluster& c : plan_.clusters) names.push_back(c.name);
    for (int k : report_.workers) {
      std::vector<double> shortest(names.size(), INFINITY);
      for (std::size_t c = 0; c < names.size(); c++)
        for (std::size_t i = 0; i < plan_.strategies.size(); i++)
          if (const Mean& m = report_.at(names[c], k, i).time.mean; int(m.count) == plan_.seeds)
            shortest[c] = std::min(shortest[c], m.value);
      const std::string t = table(rows(0), names, [&](std::size_t c, std::size_t i) {
        const CensoredMean& m = report_.at(names[c], k, i).time;
        return m.runs == 0 ? ""
                           : entry(m.mean.value == shortest[c],
                                   seconds_text(m.mean) + small(marked(censored_text(m, plan_.seeds))));
      });
      section("K = " + std::to_string(k) + ": time to " + target_text(plan_) + " on every cluster",
              captioned(t,
                        "Virtual seconds to " + target_text(plan_) +
                            " test accuracy: mean ± standard error over the final runs that reach it. "
                            "Bold: the shortest of a column, of the strategies all of whose runs reach it. " +
                            censored_times,
                        report_.conditions()));
    }
  }

  void section(const std::string& title, const std::string& html) {
    if (!html.empty()) html_ += "<h3>" + title + "</h3>\n" + html;
  }

  using Rows = std::vector<std::pair<std::size_t, std::string>>;  // strategies and their names
  Rows rows(std::size_t first) const {
    Rows rows;
    for (std::size_t i = first; i < plan_.strategies.size(); i++) rows.push_back({i, report_.label(i)});
    return rows;
  }
  static std::string entry(bool best, const std::string& html) {
    return (best ? "<td class=\"best\">" : "<td>") + html + "</td>";
  }

  // Those rows of which entry(column, strategy) says something: "<td>…</td>", or nothing. By default a column for each
  // number of workers.
  template <class Entry>
  std::string table(const Rows& rows, const Entry& entry) {
    std::vector<std::string> columns;
    for (int k : report_.workers) columns.push_back("K = " + std::to_string(k));
    return table(rows, columns, [&](std::size_t column, std::size_t i) { return entry(report_.workers[column], i); });
  }
  template <class Entry>
  std::string table(const Rows& rows, const std::vector<std::string>& columns, const Entry& entry) {
    std::string html = "<div class=\"scroll\"><table>\n<thead><tr><th>strategy</th>";
    bool some = false;
    for (const std::string& column : columns) html += "<th>" + html_escaped(column) + "</th>";
    html += "</tr></thead>\n<tbody>\n";
    for (const auto& [i, name] : rows) {
      std::string row;
      bool said = false;
      for (std::size_t column = 0; column < columns.size(); column++) {
        const std::string e = entry(column, i);
        said = said || !e.empty();
        row += e.empty() ? "<td>–</td>" : e;
      }
      if (said) html += "<tr><td>" + breakable(html_escaped(name)) + "</td>" + row + "</tr>\n";
      some = some || said;
    }
    return some ? html + "</tbody></table></div>\n" : "";
  }

  void accuracies(const std::string& cluster) {
    const std::string t = table(rows(0), [&](int k, std::size_t i) -> std::string {
      const CellReport& c = report_.at(cluster, k, i);
      if (c.accuracy.runs == 0) return "";
      const bool best =
          !plan_.by_time && c.accuracy.mean.count == c.accuracy.runs &&
          std::none_of(plan_.strategies.begin(), plan_.strategies.end(), [&](const SearchedStrategy& other) {
            return report_.at(cluster, k, std::size_t(&other - &plan_.strategies[0])).accuracy.mean.value >
                   c.accuracy.mean.value + 1e-9;
          });
      return entry(best, points(c.accuracy.mean) + small(chosen_text(c.search, c.cell) + (c.search.edge ? " †" : "")) +
                             small(marked(censored_text(c.accuracy, plan_.seeds))));
    });
    section("Test accuracy",
            captioned(
                t,
                std::string(plan_.by_time ? "Test accuracy in % where the target was reached, or at the end"
                                          : "Test accuracy in %") +
                    ": mean ± standard error over the final runs that did not diverge, and what the search "
                    "chose. Bold: the highest mean of a column, if no run is censored. † A neighbour "
                    "of what was chosen was not tried within the budget, or its momentum is the largest that there is. "
                    "‡ These runs are not in the mean.",
                report_.conditions()));
  }

  void advantages(const std::string& cluster) {
    const std::string t = table(rows(1), [&](int k, std::size_t i) -> std::string {
      const Paired p =
          advantage(plan_, report_.results, report_.at(cluster, k, 0).cell, report_.at(cluster, k, i).cell);
      if (p.pairs + p.censored == 0) return "";
      const PairedText t = text_of(p, "%+.2f", 100, plan_.seeds);
      return entry(p.low > 0 || p.high < 0, t.value + small(t.interval) + small(marked(t.pairs)));
    });
    section("Paired differences", captioned(t,
                                            "Points of test accuracy by which " + plan_.strategies[0].text +
                                                " is better than the strategy of the row, "
                                                "paired by seed [95 % t-interval; not corrected for the number of "
                                                "comparisons]. Bold: 0 is outside the interval. "
                                                "‡ Pairs in which a run diverged or is missing are left out.",
                                            report_.conditions()));
  }

  void times(const std::string& cluster) {
    const std::string t = table(rows(0), [&](int k, std::size_t i) -> std::string {
      const CellReport& c = report_.at(cluster, k, i);
      if (c.time.runs == 0) return "";
      std::string html = seconds_text(c.time.mean);
      if (const Paired p = time_ratio(plan_, report_.results, c.cell, report_.at(cluster, k, 0).cell);
          i > 0 && p.pairs > 0) {
        const PairedText t = text_of(p, "%.2f", 1, plan_.seeds);
        html += small("× " + t.value + (t.interval.empty() ? "" : " " + t.interval));
      }
      return entry(false, html + small(marked(censored_text(c.time, plan_.seeds))));
    });
    const std::string target = target_text(plan_);
    section("Time to " + target + " test accuracy",
            captioned(t,
                      "Virtual seconds to the first evaluation at or above " + target +
                          ", interpolated: mean ± standard error "
                          "over the runs that reach it. ×: as a multiple of the time of " +
                          plan_.strategies[0].text +
                          ", geometric mean over the pairs of seeds that both reach it, after their first evaluation "
                          "[95 % t-interval]. " +
                          censored_times,
                      report_.conditions()));
  }

  void participation(const std::string& cluster) {
    bool drops = false;
    std::vector<std::pair<std::size_t, std::string>> rows;
    for (const auto& group : delay_groups(report_, cluster)) rows.push_back({group[0], report_.group_label(group)});
    const std::string t = table(rows, [&](int k, std::size_t i) -> std::string {
      std::vector<double> shares, late;
      double dropped = 0;
      for (const auto& [seed, o] : report_.at(cluster, k, i).runs) {
        double pushes = 0, sum = 0;
        for (std::size_t d = 0; d < o->delays.size(); d++) pushes += o->delays[d], sum += double(d) * o->delays[d];
        if (pushes > 0) late.push_back(sum / pushes);
        shares.push_back(o->participation), dropped += o->dropped;
      }
      if (late.empty()) return "";
      drops = drops || dropped > 0;
      const std::string applied = printed("%.1f %% applied", 100 * mean_of(shares).value);
      return "<td>" + printed("%.1f", mean_of(late).value) + (dropped > 0 ? small(applied) : "") + "</td>";
    });
    if (!t.empty())
      html_ +=
          captioned(t,
                    std::string("Mean delay of a push, in updates") +
                        (drops ? "; where a strategy dropped pushes, the share of all pushes that was applied" : "") +
                        ". Means over all final runs.",
                    report_.conditions());
  }

  const Plan& plan_;
  ExperimentReport report_;
  std::string html_;
};

}  // namespace

std::string experiment_page(const Plan& plan, const Results& results) { return Page(plan, results).written(); }

}  // namespace tandem
