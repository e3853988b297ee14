// The tuner's page: one HTML file that needs nothing else.
#include <algorithm>
#include <cmath>

#include "core/text.h"
#include "layers/export/chart.h"
#include "layers/train/tuner.h"

namespace tandem {
namespace {

constexpr double MiB = 1 << 20;

const char* const page_style = R"css(body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1180px;margin:0 auto;padding:24px 16px}h1{font-size:24px}h2{font-size:18px;margin-top:32px}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(420px,100%),1fr));gap:14px}
.charts>div{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:10px}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:4px 8px;text-align:right;border-bottom:1px solid var(--rule);white-space:nowrap}tr.best{font-weight:700}p{color:var(--soft)}
)css";

// Bytes in each event of the saved tensors with this fate that are there whatever the copies do.
std::vector<double> held(const TunedBatch& b, Fate fate) {
  const std::size_t events = b.record.events.size();
  std::vector<double> bytes(events);
  for (std::size_t i = 0; i < b.record.saved.size(); i++) {
    const SavedRecord& s = b.record.saved[i];
    if (s.saved < 0 || b.choice.fates[i] != fate) continue;
    const int end = s.gone < 0 ? int(events) - 1 : s.gone, read = b.choice.forecast.read_at[i];
    for (int e = s.saved + 1; e <= end; e++)
      if (fate == Fate::keep || e <= std::max(s.free_at, s.last_used) || e >= read) bytes[std::size_t(e)] += double(s.bytes);
  }
  return bytes;
}

// Memory over the iteration: filled areas, each over the one before it, the largest first.
Chart memory_chart(const TunedBatch& b, std::size_t budget) {
  const std::vector<double> kept = held(b, Fate::keep), again = held(b, Fate::recompute);
  const Forecast& f = b.choice.forecast;
  Line swapped{.label = "swapped", .colour = 1, .stroke = Line::Stroke::area}, computed = swapped, stays = swapped, base = swapped;
  computed.label = "recomputed", computed.colour = 2;
  stays.label = "kept", stays.colour = 0;
  base.label = "the rest", base.colour = 7;
  Line limit{.label = "budget", .colour = 8, .stroke = Line::Stroke::dashed};
  double time = 0;
  for (std::size_t e = 0; e < f.live.size(); e++) {
    const double rest = double(b.record.events[e].base), all = double(f.live[e]), fixed = rest + kept[e];
    const double ys[] = {all, std::min(all, fixed + again[e]), std::min(all, fixed), rest};
    Line* lines[] = {&swapped, &computed, &stays, &base};
    for (int step = 0; step < 2; step++) {  // a level for as long as the event lasts
      for (int k = 0; k < 4; k++) lines[k]->x.push_back(1e3 * time), lines[k]->y.push_back(ys[k] / MiB);
      if (step == 0) time += b.record.events[e].seconds;
    }
  }
  limit.x = {0, 1e3 * time}, limit.y = {double(budget) / MiB, double(budget) / MiB};
  return {.title = "Memory over one iteration, minibatch " + std::to_string(b.batch),
          .x_unit = "ms of computation, without stalls",
          .y_unit = "MiB",
          .lines = {swapped, computed, stays, base, limit},
          .from_zero = true};
}

// The chosen minibatch with budgets from the least to what needs no plan.
Chart budget_chart(const TunedBatch& b, const TunerOptions& o) {
  Chart chart{.title = "Time against budget, minibatch " + std::to_string(b.batch), .x_unit = "MiB of budget", .y_unit = "ms", .from_zero = true};
  const double most = double(peak_kept(b.record));
  int colour = 0;
  for (const auto& [name, swap, recompute] : {std::tuple{"swap and recompute", true, true}, {"swap", true, false}, {"recompute", false, true}}) {
    MemoryMeans means = o.means;
    means.swap = means.swap && swap, means.recompute = means.recompute && recompute;
    Line line{.label = name, .colour = colour++};
    if (!means.swap && !means.recompute) continue;
    const double least = double(smallest_budget(b.record, means));
    for (int k = 0; k <= 10; k++) {
      const double budget = least + (most - least) * k / 10;
      const MemoryChoice c = choose_memory(b.record, std::size_t(std::ceil(budget)), means);
      if (!c.fits) continue;
      line.x.push_back(budget / MiB), line.y.push_back(1e3 * c.forecast.seconds);
    }
    chart.lines.push_back(line);
  }
  return chart;
}

Chart batch_chart(const std::vector<TunedBatch>& rows) {
  Line predicted{.label = "predicted"}, measured{.label = "measured", .colour = 1, .stroke = Line::Stroke::dashed};
  for (const TunedBatch& r : rows) {
    if (!r.fits()) continue;
    predicted.x.push_back(std::log2(double(r.batch))), predicted.y.push_back(1e3 * r.per_sample());
    if (!r.measured) continue;
    measured.x.push_back(predicted.x.back()), measured.y.push_back(1e3 * (*r.measured + r.exposed) / double(r.batch));
  }
  Chart chart{.title = "Time of a sample", .x_unit = "minibatch", .y_unit = "ms", .lines = {predicted}, .from_zero = true, .x_powers = true};
  if (!measured.x.empty()) chart.lines.push_back(measured);
  return chart;
}

}  // namespace

std::string tuner_page(const std::vector<TunedBatch>& rows, const TunedBatch& chosen, const TunerOptions& o, const std::string& title) {
  std::string html = "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" "
                     "content=\"width=device-width, initial-scale=1\">\n<meta name=\"generator\" content=\"Tandem tune\">\n<title>" +
                     html_escaped(title) + "</title>\n<style>\n" + chart_style() + page_style + "</style>\n</head>\n<body>\n<main>\n<h1>" +
                     html_escaped(title) + "</h1>\n<p>Budget " + readable_bytes(double(o.budget)) + "; copies " +
                     readable_bytes(o.means.out) + "/s out, " + readable_bytes(o.means.in) + "/s in. Predictions of the simulated plan" +
                     (std::any_of(rows.begin(), rows.end(), [](auto& r) { return r.measured.has_value(); }) ? ", and measurements" : "") +
                     ".</p>\n<div class=\"charts\">\n";
  for (const Chart& c : {memory_chart(chosen, o.budget), budget_chart(chosen, o), batch_chart(rows)}) html += "<div>" + svg_of(c) + "</div>\n";
  html += "</div>\n<h2>Minibatches</h2>\n<div class=\"scroll\"><table>\n<thead><tr><th>minibatch</th><th>peak</th><th>swapped</th>"
          "<th>recomputed</th><th>ms a step</th><th>of these waiting</th><th>exchange</th><th>ms a sample</th><th>measured</th></tr></thead>\n<tbody>\n";
  for (const TunedBatch& r : rows) {
    const Forecast& f = r.choice.forecast;
    html += std::string(&r == &chosen ? "<tr class=\"best\"><td>" : "<tr><td>") + std::to_string(r.batch);
    if (!r.fits()) {
      html += "</td><td colspan=\"8\">does not fit: at least " + readable_bytes(double(r.least)) + "</td></tr>\n";
      continue;
    }
    html += printed("</td><td>%s</td><td>%s</td><td>%s</td><td>%.4g</td><td>%.3g</td><td>%.3g</td><td>%.4g</td><td>%s</td></tr>\n",
                    readable_bytes(double(f.peak)).c_str(), readable_bytes(double(f.swapped)).c_str(),
                    readable_bytes(double(f.recomputed)).c_str(), 1e3 * f.seconds, 1e3 * f.stall, 1e3 * r.exposed, 1e3 * r.per_sample(),
                    r.measured ? printed("%.4g", 1e3 * (*r.measured + r.exposed) / double(r.batch)).c_str() : "–");
  }
  return html + "</tbody></table></div>\n</main>\n</body>\n</html>\n";
}

}  // namespace tandem
