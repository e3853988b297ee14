#include "layers/export/report.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <set>

#include "core/error.h"
#include "core/files/files.h"
#include "core/files/json.h"
#include "layers/export/chart.h"

namespace tandem {
namespace {

double number_of(const Json& line, const char* name) {
  const Json* v = line.find(name);
  return v && v->is(Json::Kind::number) ? v->number : NAN;
}

std::string text_of(const Json& v) {
  switch (v.kind) {
    case Json::Kind::text: return v.text;
    case Json::Kind::number: return short_number(v.number, 7);
    case Json::Kind::boolean: return v.boolean ? "yes" : "no";
    case Json::Kind::array: {
      std::string all;
      for (const Json& item : v.items) all += (all.empty() ? "" : ", ") + text_of(item);
      return all;
    }
    default: return "–";
  }
}

void flatten(const Json& object, const std::string& prefix, std::vector<std::pair<std::string, std::string>>& out) {
  for (const auto& [name, v] : object.members) {
    if (prefix.empty() && (name == "event" || name == "run")) continue;
    if (v.is(Json::Kind::object))
      flatten(v, prefix + name + ".", out);
    else if (v.is(Json::Kind::number) && v.number == std::floor(v.number) && std::fabs(v.number) < 1e15)
      out.emplace_back(prefix + name, std::to_string(static_cast<long long>(v.number)));
    else
      out.emplace_back(prefix + name, text_of(v));
  }
}

// One line of the file; throws Error saying what is wrong with it.
bool read_line(RunLog& run, const Json& line, double per_epoch) {
  const Json* event = line.find("event");
  require(line.is(Json::Kind::object) && event && event->is(Json::Kind::text),
          "not a line of metrics: there is no \"event\"");
  if (event->text == "start") {
    flatten(line, "", run.options);
  } else if (event->text == "epoch") {
    RunLog::Epoch e{
        number_of(line, "epoch"),         number_of(line, "train_loss"),    number_of(line, "train_accuracy"),
        number_of(line, "val_loss"),      number_of(line, "val_accuracy"),  number_of(line, "test_loss"),
        number_of(line, "test_accuracy"), number_of(line, "learning_rate"), number_of(line, "images_per_second"),
        number_of(line, "seconds")};
    require(std::isfinite(e.epoch), "an epoch without its number");
    require(run.epochs.empty() || e.epoch > run.epochs.back().epoch, "epoch ", e.epoch, " after epoch ",
            run.epochs.empty() ? 0 : run.epochs.back().epoch, ": are two runs in one file?");
    run.epochs.push_back(e);
  } else if (event->text == "step") {
    double step = number_of(line, "step");
    require(std::isfinite(step) && per_epoch > 0, "a step without its number, or before the start line");
    run.steps.push_back({step / per_epoch, number_of(line, "loss"), number_of(line, "learning_rate")});
  } else if (event->text == "not_finite") {
    const Json* reason = line.find("reason");
    run.remarks.push_back("stopped: " + (reason ? text_of(*reason) : "a value was not finite"));
  } else if (event->text == "warning") {
    if (const Json* text = line.find("text")) run.remarks.push_back("warning: " + text_of(*text));
  } else if (event->text == "end") {
    run.ended = true;
    for (const auto& [name, v] : line.members)
      if (v.is(Json::Kind::number)) run.end[name] = v.number;
    run.stopped = run.end.count("stopped") && run.end["stopped"] != 0;
  }  // other events are for other readers
  return true;
}

}  // namespace

RunLog read_run(const std::string& path) {
  const std::string text = read_file(path);
  RunLog run;
  run.path = path;
  run.label = std::filesystem::path(path).stem().string();
  double per_epoch = 0;
  int good = 0, number = 0;
  std::vector<std::string> bad;
  for (std::size_t begin = 0; begin < text.size();) {
    std::size_t end = text.find('\n', begin);
    const bool whole = end != text.npos;
    if (!whole) end = text.size();
    std::string_view line = std::string_view(text).substr(begin, end - begin);
    begin = end + 1;
    number++;
    if (line.find_first_not_of(" \t\r") == line.npos) continue;
    try {
      Json value = Json::parse(line);
      if (double b = number_of(value, "batches_per_epoch"); b > 0) per_epoch = b;
      good += read_line(run, value, per_epoch);
    } catch (const Error& e) {
      bad.push_back(path + ":" + std::to_string(number) + ": " +
                    (whole ? std::string(e.what()) : "cut off in the middle of the line"));
    }
  }
  if (good == 0) {
    if (bad.empty()) refuse(path, ": empty: a run writes it with --metrics");
    refuse(bad.front(), ": these are not metrics (a run writes them with --metrics)");
  }
  const std::size_t shown = 5;
  for (std::size_t i = 0; i < std::min(bad.size(), shown); i++) run.remarks.push_back(bad[i]);
  if (bad.size() > shown)
    run.remarks.push_back(path + ": " + std::to_string(bad.size() - shown) + " more lines could not be used");
  if (!run.ended)
    run.remarks.push_back("no end line: the run was killed, or is still going");
  else if (run.stopped)
    run.remarks.push_back("the run was stopped before its last epoch");
  return run;
}

std::vector<std::string> labels_of(const std::vector<std::string>& paths) {
  std::vector<std::string> stems;
  for (const std::string& p : paths) stems.push_back(std::filesystem::path(p).stem().string());
  if (std::set<std::string>(stems.begin(), stems.end()).size() < stems.size()) stems = paths;  // same names elsewhere
  if (stems.size() < 2) return stems;
  std::size_t head = 0, tail = 0, shortest = stems[0].size();
  for (const std::string& s : stems) shortest = std::min(shortest, s.size());
  auto all = [&](auto at) {
    return std::all_of(stems.begin(), stems.end(), [&](auto& s) { return at(s) == at(stems[0]); });
  };
  while (head < shortest && all([&](const std::string& s) { return s[head]; })) head++;
  while (tail < shortest - head && all([&](const std::string& s) { return s[s.size() - 1 - tail]; })) tail++;
  // Cut at the borders of words only: seed1 and seed2 are not 1 and 2.
  auto letter = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) || (c & 0x80); };
  while (head > 0 && letter(stems[0][head - 1])) head--;
  while (tail > 0 && letter(stems[0][stems[0].size() - tail])) tail--;
  for (std::string& s : stems) {
    s = s.substr(head, s.size() - head - tail);
    if (s.empty()) return paths;
  }
  return stems;
}

namespace {

using Value = std::function<double(const RunLog::Epoch&)>;

const char* const page_style = R"css(
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1180px;margin:0 auto;padding:24px 20px 48px;overflow-wrap:break-word}
h1{font-size:24px;line-height:1.25;margin:0 0 4px}h2{font-size:17px;margin:34px 0 10px}
p{margin:4px 0 12px;color:var(--soft);max-width:75ch}
.runs{display:flex;flex-wrap:wrap;gap:6px 18px;list-style:none;margin:12px 0 0;padding:0}
.runs li{display:flex;align-items:center;gap:8px}
.swatch{display:inline-block;flex:none;width:18px;height:4px;border-radius:2px;vertical-align:middle}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:14px}
.charts>div{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:10px 10px 6px}
.scroll{overflow-x:auto;background:var(--card);border:1px solid var(--rule);border-radius:8px}
table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
th,td{padding:6px 12px;text-align:right;border-top:1px solid var(--rule);white-space:nowrap}
th:first-child,td:first-child{text-align:left}
thead th{border-top:0;color:var(--soft);font-weight:600;white-space:normal;vertical-align:bottom}
tbody td:first-child{white-space:normal;overflow-wrap:anywhere;min-width:11em}
.options td,.options thead th{text-align:left;white-space:normal;overflow-wrap:anywhere;min-width:4em;vertical-align:top}
.options th{text-align:left;vertical-align:top}
tr.differs th,tr.differs td{font-weight:600}tr.same th,tr.same td{color:var(--soft);font-weight:400}
.best{font-weight:700}
.remarks{margin:12px 0 0;padding:8px 12px 8px 30px;border-left:4px solid #d08700;background:var(--card);overflow-wrap:anywhere}
@media (max-width:520px){main{padding:16px 12px 36px}h1{font-size:20px}th,td{padding:6px 9px}}
)css";

std::string swatch(std::size_t i) {
  return "<span class=\"swatch\" style=\"background:var(--c" + std::to_string(int(i) % chart_colours) + ")\"></span>";
}

std::string duration(double s) {
  if (!std::isfinite(s)) return "–";
  char text[32];
  if (s < 120)
    std::snprintf(text, sizeof text, "%.1f s", s);
  else if (s < 7200)
    std::snprintf(text, sizeof text, "%.1f min", s / 60);
  else
    std::snprintf(text, sizeof text, "%.1f h", s / 3600);
  return text;
}

}  // namespace

std::string report_page(const std::vector<RunLog>& runs, const std::string& title) {
  std::string page =
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"generator\" content=\"Tandem\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>" +
      html_escaped(title) + "</title>\n<style>\n" + chart_style() + page_style + "</style>\n</head>\n" +
      "<body>\n<main>\n<h1>" + html_escaped(title) + "</h1>\n";
  if (runs.size() > 1) {
    page += "<ul class=\"runs\">\n";
    for (std::size_t i = 0; i < runs.size(); i++) page += "<li>" + swatch(i) + html_escaped(runs[i].label) + "</li>\n";
    page += "</ul>\n";
  }
  std::string remarks;
  for (const RunLog& r : runs)
    for (const std::string& remark : r.remarks)
      remarks += "<li>" + html_escaped(remark.starts_with(r.path) ? remark : r.label + ": " + remark) + "</li>\n";
  if (!remarks.empty()) page += "<ul class=\"remarks\">\n" + remarks + "</ul>\n";

  auto has = [&](const Value& value) {
    return std::any_of(runs.begin(), runs.end(), [&](const RunLog& r) {
      return std::any_of(r.epochs.begin(), r.epochs.end(), [&](const auto& e) { return std::isfinite(value(e)); });
    });
  };

  // ---- final numbers: a row for each run ----
  struct Column {
    const char* name;
    std::function<double(const RunLog&)> value;
    std::function<std::string(double)> show;
    int better;  // +1: more, −1: less, 0: neither
  };
  auto last = [](double RunLog::Epoch::*field) {
    return [field](const RunLog& r) { return r.epochs.empty() ? NAN : r.epochs.back().*field; };
  };
  auto best = [](double RunLog::Epoch::*field) {
    return [field](const RunLog& r) {
      double most = NAN;
      for (const auto& e : r.epochs)
        if (!(most >= e.*field)) most = e.*field;
      return most;
    };
  };
  auto share = [](double v) {
    char text[24];
    std::snprintf(text, sizeof text, "%.2f %%", 100 * v);
    return std::isfinite(v) ? std::string(text) : std::string("–");
  };
  auto plain = [](double v) { return short_number(v, 4); };
  const std::vector<Column> columns = {
      {"epochs", [](const RunLog& r) { return double(r.epochs.size()); }, plain, 0},
      {"training loss", last(&RunLog::Epoch::train_loss), plain, 0},
      {"training accuracy", last(&RunLog::Epoch::train_accuracy), share, 0},
      {"validation accuracy", last(&RunLog::Epoch::val_accuracy), share, 1},
      {"test loss", last(&RunLog::Epoch::test_loss), plain, -1},
      {"test accuracy", last(&RunLog::Epoch::test_accuracy), share, 1},
      {"best test accuracy", best(&RunLog::Epoch::test_accuracy), share, 0},
      {"images/s",
       [](const RunLog& r) {
         std::vector<double> v;
         for (const auto& e : r.epochs)
           if (std::isfinite(e.images_per_second)) v.push_back(e.images_per_second);
         if (v.empty()) return double(NAN);
         std::nth_element(v.begin(), v.begin() + long(v.size() / 2), v.end());
         return v[v.size() / 2];
       },
       plain, 1},
      {"training time",
       [](const RunLog& r) {
         double sum = 0;
         for (const auto& e : r.epochs) sum += e.seconds;
         return r.epochs.empty() ? NAN : sum;
       },
       duration, 0},
  };
  page += "<h2>At the end</h2>\n<div class=\"scroll\"><table>\n<thead><tr><th>run</th>";
  std::vector<const Column*> shown;
  for (const Column& c : columns)
    if (std::any_of(runs.begin(), runs.end(), [&](const RunLog& r) { return std::isfinite(c.value(r)); })) {
      shown.push_back(&c);
      page += "<th>" + std::string(c.name) + "</th>";
    }
  page += "</tr></thead>\n<tbody>\n";
  for (std::size_t i = 0; i < runs.size(); i++) {
    page += "<tr><td>" + swatch(i) + " " + html_escaped(runs[i].label) + "</td>";
    for (const Column* c : shown) {
      double v = c->value(runs[i]);
      bool leads = runs.size() > 1 && c->better != 0 && std::isfinite(v);
      for (const RunLog& r : runs)
        if (double w = c->value(r); std::isfinite(w) && c->better * w > c->better * v) leads = false;
      page += std::string(leads ? "<td class=\"best\">" : "<td>") + c->show(v) + "</td>";
    }
    page += "</tr>\n";
  }
  page +=
      "</tbody></table></div>\n<p>After the last epoch that a file holds; images/s is the median over epochs.</p>\n";

  // ---- charts: a row for each quantity, by epoch and by time ----
  double longest = 0;
  for (const RunLog& r : runs) {
    double sum = 0;
    for (const auto& e : r.epochs) sum += std::isfinite(e.seconds) ? e.seconds : 0;
    longest = std::max(longest, sum);
  }
  const double unit = longest > 7200 ? 3600 : longest > 180 ? 60 : 1;
  const std::string unit_name = unit == 3600 ? "hours of training"
                                : unit == 60 ? "minutes of training"
                                             : "seconds of training";

  struct Curve {
    const char* what;
    Value value;
    Line::Stroke stroke;
  };
  auto field = [](double RunLog::Epoch::*f) { return [f](const RunLog::Epoch& e) { return e.*f; }; };
  auto draw = [&](Chart chart, std::vector<Curve> curves, bool by_time, bool steps, double RunLog::Step::*step_field) {
    std::erase_if(curves, [&](const Curve& c) { return !has(c.value); });
    static constexpr const char* names[] = {"solid", "dashed", "dotted", "faint"};
    if (curves.size() > 1 || (curves.size() == 1 && curves[0].stroke != Line::Stroke::solid))
      for (const Curve& c : curves)
        chart.note += (chart.note.empty() ? "" : ", ") + std::string(names[int(c.stroke)]) + ": " + c.what;
    chart.x_unit = by_time ? unit_name : "epoch";
    chart.x_whole = !by_time;
    if (by_time) chart.x_holds = {0, longest / unit};
    for (std::size_t i = 0; i < runs.size(); i++) {
      if (steps && !by_time && !runs[i].steps.empty()) {
        Line l{.label = runs[i].label,
               .x = {},
               .y = {},
               .colour = int(i),
               .stroke = Line::Stroke::faint,
               .labelled = false};
        for (const auto& s : runs[i].steps) l.x.push_back(s.epoch), l.y.push_back(s.*step_field);
        chart.lines.push_back(l);
      }
      bool labelled = true;
      for (const Curve& c : curves) {
        Line l{.label = runs.size() > 1 ? runs[i].label : c.what,
               .x = {},
               .y = {},
               .colour = int(i),
               .stroke = c.stroke,
               .labelled = runs.size() > 1 ? labelled : curves.size() > 1};
        double time = 0;
        for (const auto& e : runs[i].epochs) {
          time += e.seconds / unit;  // without a time there is no place for it
          l.x.push_back(by_time ? time : e.epoch);
          l.y.push_back(c.value(e));
        }
        chart.lines.push_back(l);
        labelled = false;
      }
    }
    if (!curves.empty()) page += "<div>" + svg_of(chart) + "</div>\n";
  };
  // A stroke means the same in every chart of the page.
  page += "<h2>By epoch and by time</h2>\n<div class=\"charts\">\n";
  for (bool by_time : {false, true})
    draw({.title = "Loss", .x_unit = "", .y_unit = ""},
         {{"test", field(&RunLog::Epoch::test_loss), Line::Stroke::solid},
          {"training", field(&RunLog::Epoch::train_loss), Line::Stroke::dashed},
          {"validation", field(&RunLog::Epoch::val_loss), Line::Stroke::dotted}},
         by_time, true, &RunLog::Step::loss);
  for (bool by_time : {false, true})
    draw({.title = "Accuracy", .x_unit = "", .y_unit = "%", .percent = true},
         {{"test", field(&RunLog::Epoch::test_accuracy), Line::Stroke::solid},
          {"training", field(&RunLog::Epoch::train_accuracy), Line::Stroke::dashed},
          {"validation", field(&RunLog::Epoch::val_accuracy), Line::Stroke::dotted}},
         by_time, false, &RunLog::Step::loss);
  for (bool by_time : {false, true})
    draw({.title = "Learning rate", .x_unit = "", .y_unit = "", .from_zero = true},
         {{"learning rate", field(&RunLog::Epoch::learning_rate), Line::Stroke::solid}}, by_time, true,
         &RunLog::Step::learning_rate);
  for (bool by_time : {false, true})
    draw({.title = "Throughput", .x_unit = "", .y_unit = "images/s", .from_zero = true},
         {{"images/s", field(&RunLog::Epoch::images_per_second), Line::Stroke::solid}}, by_time, false,
         &RunLog::Step::loss);
  page += "</div>\n";

  // ---- options: a column for each run; what differs stands out ----
  std::vector<std::string> names;
  for (const RunLog& r : runs)
    for (const auto& [name, value] : r.options)
      if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  if (!names.empty()) {
    page += "<h2>Options</h2>\n<div class=\"scroll\"><table class=\"options\">\n<thead><tr><th></th>";
    for (std::size_t i = 0; i < runs.size(); i++)
      page += "<th>" + swatch(i) + " " + html_escaped(runs[i].label) + "</th>";
    page += "</tr></thead>\n<tbody>\n";
    for (const std::string& name : names) {
      std::vector<std::string> values;
      for (const RunLog& r : runs) {
        auto it = std::find_if(r.options.begin(), r.options.end(), [&](const auto& o) { return o.first == name; });
        values.push_back(it == r.options.end() ? "–" : it->second);
      }
      std::set<std::string> told(values.begin(), values.end());
      told.erase("–");  // a run that does not say does not differ
      bool same = told.size() == 1;
      page += std::string("<tr class=\"") + (runs.size() > 1 ? same ? "same" : "differs" : "") + "\"><th>" +
              html_escaped(name) + "</th>";
      for (const std::string& v : values) page += "<td>" + html_escaped(v) + "</td>";
      page += "</tr>\n";
    }
    page += "</tbody></table></div>\n";
  }
  page += "<h2>Files</h2>\n<ul>\n";
  for (const RunLog& r : runs) page += "<li>" + html_escaped(r.path) + "</li>\n";
  return page + "</ul>\n</main>\n</body>\n</html>\n";
}

}  // namespace tandem
