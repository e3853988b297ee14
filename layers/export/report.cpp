#include "layers/export/report.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <set>

#include "core/error.h"
#include "core/files/files.h"
#include "core/files/json.h"
#include "core/text.h"
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

std::string duration(double s) {
  if (!std::isfinite(s)) return "–";
  return s < 120 ? printed("%.1f s", s) : s < 7200 ? printed("%.1f min", s / 60) : printed("%.1f h", s / 3600);
}
std::string share(double v) { return std::isfinite(v) ? printed("%.2f %%", 100 * v) : "–"; }
std::string plain(double v) { return short_number(v); }

// ---- final numbers of a run ----
struct Column {
  const char* name;
  std::function<double(const RunLog&)> value;
  std::string (*show)(double);
  int better;  // +1: more, −1: less, 0: neither
};

auto last(double RunLog::Epoch::*field) {
  return [field](const RunLog& r) { return r.epochs.empty() ? NAN : r.epochs.back().*field; };
}

auto best(double RunLog::Epoch::*field) {
  return [field](const RunLog& r) {
    double most = NAN;
    for (const auto& e : r.epochs)
      if (!(most >= e.*field)) most = e.*field;
    return most;
  };
}

double median_speed(const RunLog& r) {
  std::vector<double> v;
  for (const auto& e : r.epochs)
    if (std::isfinite(e.images_per_second)) v.push_back(e.images_per_second);
  if (v.empty()) return NAN;
  std::nth_element(v.begin(), v.begin() + long(v.size() / 2), v.end());
  return v[v.size() / 2];
}

double training_time(const RunLog& r) {
  double sum = 0;
  for (const auto& e : r.epochs) sum += e.seconds;
  return r.epochs.empty() ? NAN : sum;
}

const Column columns[] = {
    {"epochs", [](const RunLog& r) { return double(r.epochs.size()); }, plain, 0},
    {"training loss", last(&RunLog::Epoch::train_loss), plain, 0},
    {"training accuracy", last(&RunLog::Epoch::train_accuracy), share, 0},
    {"validation accuracy", last(&RunLog::Epoch::val_accuracy), share, 1},
    {"test loss", last(&RunLog::Epoch::test_loss), plain, -1},
    {"test accuracy", last(&RunLog::Epoch::test_accuracy), share, 1},
    {"best test accuracy", best(&RunLog::Epoch::test_accuracy), share, 0},
    {"images/s", median_speed, plain, 1},
    {"training time", training_time, duration, 0},
};

// ---- charts: one for each quantity, by epoch and by time ----
struct Curve {
  const char* what;
  double RunLog::Epoch::*value;
  Line::Stroke stroke;  // means the same in every chart of the page
};

struct Quantity {
  Chart chart;
  std::vector<Curve> curves;
  double RunLog::Step::*steps = nullptr;  // drawn behind the curves
};

const Quantity quantities[] = {
    {{.title = "Loss", .x_unit = "", .y_unit = ""},
     {{"test", &RunLog::Epoch::test_loss, Line::Stroke::solid},
      {"training", &RunLog::Epoch::train_loss, Line::Stroke::dashed},
      {"validation", &RunLog::Epoch::val_loss, Line::Stroke::dotted}},
     &RunLog::Step::loss},
    {{.title = "Accuracy", .x_unit = "", .y_unit = "%", .percent = true},
     {{"test", &RunLog::Epoch::test_accuracy, Line::Stroke::solid},
      {"training", &RunLog::Epoch::train_accuracy, Line::Stroke::dashed},
      {"validation", &RunLog::Epoch::val_accuracy, Line::Stroke::dotted}}},
    {{.title = "Learning rate", .x_unit = "", .y_unit = "", .from_zero = true},
     {{"learning rate", &RunLog::Epoch::learning_rate, Line::Stroke::solid}},
     &RunLog::Step::learning_rate},
    {{.title = "Throughput", .x_unit = "", .y_unit = "images/s", .from_zero = true},
     {{"images/s", &RunLog::Epoch::images_per_second, Line::Stroke::solid}}},
};

// A page while it is written: a method for each part, in their order.
class Page {
 public:
  explicit Page(const std::vector<RunLog>& runs) : runs_(runs) {}

  std::string written(const std::string& title) {
    head(title);
    final_numbers();
    charts();
    options();
    html_ += "<h2>Files</h2>\n<ul>\n";
    for (const RunLog& r : runs_) html_ += "<li>" + html_escaped(r.path) + "</li>\n";
    return html_ + "</ul>\n</main>\n</body>\n</html>\n";
  }

 private:
  void head(const std::string& title) {
    html_ = "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
            "<meta name=\"generator\" content=\"Tandem\">\n"
            "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>" +
            html_escaped(title) + "</title>\n<style>\n" + chart_style() + page_style + "</style>\n</head>\n" +
            "<body>\n<main>\n<h1>" + html_escaped(title) + "</h1>\n";
    if (runs_.size() > 1) {
      html_ += "<ul class=\"runs\">\n";
      for (std::size_t i = 0; i < runs_.size(); i++) html_ += "<li>" + swatch(i) + html_escaped(runs_[i].label) + "</li>\n";
      html_ += "</ul>\n";
    }
    std::string remarks;
    for (const RunLog& r : runs_)
      for (const std::string& remark : r.remarks)
        remarks += "<li>" + html_escaped(remark.starts_with(r.path) ? remark : r.label + ": " + remark) + "</li>\n";
    if (!remarks.empty()) html_ += "<ul class=\"remarks\">\n" + remarks + "</ul>\n";
  }

  void final_numbers() {  // a row for each run
    html_ += "<h2>At the end</h2>\n<div class=\"scroll\"><table>\n<thead><tr><th>run</th>";
    std::vector<const Column*> shown;
    for (const Column& c : columns)
      if (std::any_of(runs_.begin(), runs_.end(), [&](const RunLog& r) { return std::isfinite(c.value(r)); })) {
        shown.push_back(&c);
        html_ += "<th>" + std::string(c.name) + "</th>";
      }
    html_ += "</tr></thead>\n<tbody>\n";
    for (std::size_t i = 0; i < runs_.size(); i++) {
      html_ += "<tr><td>" + named(i) + "</td>";
      for (const Column* c : shown) {
        double v = c->value(runs_[i]);
        bool leads = runs_.size() > 1 && c->better != 0 && std::isfinite(v);
        for (const RunLog& r : runs_)
          if (double w = c->value(r); std::isfinite(w) && c->better * w > c->better * v) leads = false;
        html_ += std::string(leads ? "<td class=\"best\">" : "<td>") + c->show(v) + "</td>";
      }
      html_ += "</tr>\n";
    }
    html_ +=
        "</tbody></table></div>\n<p>After the last epoch that a file holds; images/s is the median over epochs.</p>\n";
  }

  void charts() {
    for (const RunLog& r : runs_) {
      double sum = 0;
      for (const auto& e : r.epochs) sum += std::isfinite(e.seconds) ? e.seconds : 0;
      longest_ = std::max(longest_, sum);
    }
    html_ += "<h2>By epoch and by time</h2>\n<div class=\"charts\">\n";
    for (const Quantity& q : quantities)
      for (bool by_time : {false, true}) chart(q, by_time);
    html_ += "</div>\n";
  }

  void chart(const Quantity& q, bool by_time) {
    Chart chart = q.chart;
    std::vector<Curve> curves = q.curves;
    std::erase_if(curves, [&](const Curve& c) { return !known(c.value); });
    if (curves.empty()) return;
    static constexpr const char* names[] = {"solid", "dashed", "dotted", "faint"};
    if (curves.size() > 1 || curves[0].stroke != Line::Stroke::solid)
      for (const Curve& c : curves)
        chart.note += (chart.note.empty() ? "" : ", ") + std::string(names[int(c.stroke)]) + ": " + c.what;
    const double unit = longest_ > 7200 ? 3600 : longest_ > 180 ? 60 : 1;
    chart.x_unit = !by_time ? "epoch" : unit == 3600 ? "hours of training" : unit == 60 ? "minutes of training" : "seconds of training";
    chart.x_whole = !by_time;
    if (by_time) chart.x_holds = {0, longest_ / unit};
    for (std::size_t i = 0; i < runs_.size(); i++) {
      const RunLog& run = runs_[i];
      if (q.steps && !by_time && !run.steps.empty()) {
        Line l{.label = run.label, .x = {}, .y = {}, .colour = int(i), .stroke = Line::Stroke::faint, .labelled = false};
        for (const auto& s : run.steps) l.x.push_back(s.epoch), l.y.push_back(s.*q.steps);
        chart.lines.push_back(l);
      }
      for (const Curve& c : curves) {
        const bool several = runs_.size() > 1;  // then a label is a run's, at its first curve
        Line l{.label = several ? run.label : c.what, .x = {}, .y = {}, .colour = int(i), .stroke = c.stroke,
               .labelled = several ? &c == &curves[0] : curves.size() > 1};
        double time = 0;
        for (const auto& e : run.epochs) {
          time += e.seconds / unit;  // without a time there is no place for it
          l.x.push_back(by_time ? time : e.epoch), l.y.push_back(e.*c.value);
        }
        chart.lines.push_back(l);
      }
    }
    html_ += "<div>" + svg_of(chart) + "</div>\n";
  }

  void options() {  // a column for each run; what differs stands out
    std::vector<std::string> names;
    for (const RunLog& r : runs_)
      for (const auto& [name, value] : r.options)
        if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
    if (names.empty()) return;
    html_ += "<h2>Options</h2>\n<div class=\"scroll\"><table class=\"options\">\n<thead><tr><th></th>";
    for (std::size_t i = 0; i < runs_.size(); i++) html_ += "<th>" + named(i) + "</th>";
    html_ += "</tr></thead>\n<tbody>\n";
    for (const std::string& name : names) {
      std::vector<std::string> values;
      for (const RunLog& r : runs_) {
        auto it = std::find_if(r.options.begin(), r.options.end(), [&](const auto& o) { return o.first == name; });
        values.push_back(it == r.options.end() ? "–" : it->second);
      }
      std::set<std::string> told(values.begin(), values.end());
      told.erase("–");  // a run that does not say does not differ
      html_ += std::string("<tr class=\"") + (runs_.size() == 1 ? "" : told.size() == 1 ? "same" : "differs") + "\"><th>" +
               html_escaped(name) + "</th>";
      for (const std::string& v : values) html_ += "<td>" + html_escaped(v) + "</td>";
      html_ += "</tr>\n";
    }
    html_ += "</tbody></table></div>\n";
  }

  bool known(double RunLog::Epoch::*value) const {
    return std::any_of(runs_.begin(), runs_.end(), [&](const RunLog& r) {
      return std::any_of(r.epochs.begin(), r.epochs.end(), [&](const auto& e) { return std::isfinite(e.*value); });
    });
  }
  static std::string swatch(std::size_t i) {
    return "<span class=\"swatch\" style=\"background:var(--c" + std::to_string(int(i) % chart_colours) + ")\"></span>";
  }
  std::string named(std::size_t i) const { return swatch(i) + " " + html_escaped(runs_[i].label); }

  const std::vector<RunLog>& runs_;
  double longest_ = 0;  // seconds of training of the longest run
  std::string html_;
};

}  // namespace

std::string report_page(const std::vector<RunLog>& runs, const std::string& title) { return Page(runs).written(title); }

}  // namespace tandem
