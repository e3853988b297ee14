// The file of an experiment's results: lines of JSON. A header line says under which conditions, by which version and
// on which CPU the runs below it were made; there is another one where any of that changed. Every other line is a run.
#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "core/backend.h"
#include "core/build_info.h"
#include "core/error.h"
#include "core/files/json.h"
#include "core/random.h"
#include "dist/lab/experiment_results.h"

namespace tandem {
namespace {

std::string exact(double v) {  // the fewest digits that give the same number when they are read
  if (!std::isfinite(v)) return "null";
  char text[32];
  return std::string(text, std::to_chars(text, text + sizeof text, v).ptr);
}
std::string array_of(const std::vector<double>& values) {
  std::string all = "[";
  for (double v : values) all += (all.size() > 1 ? "," : "") + exact(v);
  return all + "]";
}

std::string conditions(const Plan& p) {
  std::ostringstream text;
  text << (p.synthetic ? "synthetic " : "") << p.data_set << ", " << p.model << ", " << p.dtype
       << (p.augment ? ", augmented" : "") << ", schedule " << p.schedule << ", batch " << p.batch << ", " << p.val
       << " held back, weight decay " << exact(p.weight_decay) << ", evaluated every " << exact(p.evaluate_every)
       << " epochs" << (p.by_time ? ", until " + exact(*p.target) : "");
  return text.str();
}
std::string conditions(const PlannedCluster& c) {
  return "shape " + exact(c.shape) + ", " + exact(c.slow_share) + " of the workers " + exact(c.slow_factor) +
         " times as slow, latency " + exact(c.latency) + " s, bandwidth " +
         (c.bandwidth > 0 ? exact(c.bandwidth) + " bytes/s" : "unlimited");
}

// The members of a line. Throws Error that names what is missing.
const Json& member(const Json& json, const char* name, Json::Kind kind) {
  const Json* v = json.find(name);
  if (!v || !v->is(kind)) fail("\"", name, "\" is ", v ? "of another type" : "missing");
  return *v;
}
double number(const Json& json, const char* name) { return member(json, name, Json::Kind::number).number; }
std::vector<double> numbers(const Json& json, const char* name) {
  std::vector<double> values;
  for (const Json& v : member(json, name, Json::Kind::array).items) {
    if (!v.is(Json::Kind::number)) fail("\"", name, "\" has something that is not a number");
    values.push_back(v.number);
  }
  return values;
}

std::pair<Trial, Outcome> result_of(const Json& json, const std::string& made_by) {
  using Kind = Json::Kind;
  Trial t{member(json, "strategy", Kind::text).text,
          int(number(json, "workers")),
          member(json, "cluster", Kind::text).text,
          number(json, "rate"),
          number(json, "momentum"),
          int(number(json, "epochs")),
          std::uint64_t(number(json, "seed")),
          member(json, "final", Kind::boolean).boolean};
  Outcome o;
  const std::string& status = member(json, "status", Kind::text).text;
  if (status != "ok" && status != "diverged") fail("\"status\" is \"", status, "\": expected ok or diverged");
  o.diverged = status == "diverged";
  if (!o.diverged) o.accuracy = number(json, t.final ? "test" : "validation");
  if (!(o.accuracy >= 0 && o.accuracy <= 1)) fail("an accuracy of ", o.accuracy, ": expected 0 to 1");
  const Json& e = member(json, "evaluations", Kind::object);
  const std::vector<double> epochs = numbers(e, "epoch"), seconds = numbers(e, "seconds"),
                            accuracies = numbers(e, "accuracy");
  if (epochs.size() != seconds.size() || epochs.size() != accuracies.size())
    fail("\"evaluations\" has lists of different lengths");
  for (std::size_t i = 0; i < epochs.size(); i++) {
    if (!(epochs[i] > (i ? epochs[i - 1] : 0) && seconds[i] >= (i ? seconds[i - 1] : 0) && accuracies[i] >= 0 &&
          accuracies[i] <= 1))
      fail("evaluation ", i + 1, " (epoch ", epochs[i], ", ", seconds[i], " s, accuracy ", accuracies[i],
           ") cannot be, or cannot follow the one before");
    o.evaluations.push_back({epochs[i], seconds[i], accuracies[i]});
  }
  if (!o.diverged && (o.evaluations.empty() || o.evaluations.back().accuracy != o.accuracy))
    fail("its accuracy, ", o.accuracy, ", is not that of the last evaluation");
  o.delays = numbers(json, "delays");
  o.participation = number(json, "participation");
  o.dropped = number(json, "dropped");
  if (json.find("refused")) o.refused = number(json, "refused");
  if (!(o.participation >= 0 && o.participation <= 1))
    fail("a participation of ", o.participation, ": expected 0 to 1");
  if (o.dropped < 0 || o.refused < 0 || std::any_of(o.delays.begin(), o.delays.end(), [](double n) { return n < 0; }))
    fail("a negative number of pushes");
  auto perhaps = [&](const char* name) {  // null: it was not finite
    const Json* v = json.find(name);
    return v && v->is(Kind::number) ? v->number : NAN;
  };
  o.gap = perhaps("gap");
  o.correction = perhaps("correction");
  o.wall_seconds = number(json, "wall_seconds");
  o.made_by = made_by;
  return {t, o};
}

// Throws Error when the header is not that of an experiment of this plan.
std::string made_by_of_header(const Json& json, const Plan& plan) {
  const std::string& of = member(json, "experiment", Json::Kind::text).text;
  const Json* data = json.find("data");
  if (data && !plan.data.empty() && data->text != plan.data)
    fail("its runs had other data (", data->text, "; now: ", plan.data, "): move it away, or bring the data back");
  if (of != conditions(plan))
    fail("holds results of another experiment (", of, "; the plan: ", conditions(plan), "): move it away");
  for (const JsonMember& m : member(json, "clusters", Json::Kind::object).members)
    for (const PlannedCluster& c : plan.clusters)
      if (c.name == m.name && conditions(c) != m.value.text)
        fail("holds results of another cluster \"", c.name, "\" (", m.value.text, "; the plan: ", conditions(c),
             "): rename the plan's");
  return member(json, "made_by", Json::Kind::text).text;
}

}  // namespace

std::string this_build() { return version() + ", " + cpu_backend(1)->description(); }

std::string header_line(const Plan& plan) {
  std::string clusters;
  for (const PlannedCluster& c : plan.clusters)
    clusters += (clusters.empty() ? "" : ",") + json_quoted(c.name) + ":" + json_quoted(conditions(c));
  return "{\"experiment\":" + json_quoted(conditions(plan)) + ",\"clusters\":{" + clusters + "}," +
         (plan.data.empty() ? "" : "\"data\":" + json_quoted(plan.data) + ",") +
         "\"made_by\":" + json_quoted(this_build()) + "}\n";
}

std::string key_of(const Trial& t) {
  std::ostringstream text;
  text << "\"strategy\":" << json_quoted(t.strategy) << ",\"workers\":" << t.workers
       << ",\"cluster\":" << json_quoted(t.cluster) << ",\"rate\":" << exact(t.rate)
       << ",\"momentum\":" << exact(t.momentum) << ",\"epochs\":" << t.epochs << ",\"seed\":" << t.seed
       << ",\"final\":" << (t.final ? "true" : "false");
  return text.str();
}

std::string line_of(const Trial& t, const Outcome& o) {
  std::vector<double> epochs, seconds, accuracies;
  for (const AccuracyAt& e : o.evaluations)
    epochs.push_back(e.epoch), seconds.push_back(e.seconds), accuracies.push_back(e.accuracy);
  std::string line = "{" + key_of(t) + ",\"status\":" + (o.diverged ? "\"diverged\"" : "\"ok\"");
  if (!o.diverged) line += std::string(t.final ? ",\"test\":" : ",\"validation\":") + exact(o.accuracy);
  line += ",\"evaluations\":{\"epoch\":" + array_of(epochs) + ",\"seconds\":" + array_of(seconds) +
          ",\"accuracy\":" + array_of(accuracies) + "},\"delays\":" + array_of(o.delays) +
          ",\"participation\":" + json_number(o.participation) + ",\"dropped\":" + exact(o.dropped) +
          ",\"refused\":" + exact(o.refused) + ",\"gap\":" + json_number(o.gap) +
          ",\"correction\":" + json_number(o.correction) + ",\"wall_seconds\":" + json_number(o.wall_seconds) + "}\n";
  return line;
}

Results read_results(const std::string& path, const Plan& plan) {
  Results results;
  std::error_code none;
  if (std::filesystem::exists(path, none) && !std::filesystem::is_regular_file(path, none))
    refuse(path, ": is not a regular file: name one for the results");
  std::ifstream file(path);
  std::string line, made_by;
  for (int number = 1; std::getline(file, line); number++) {
    try {
      const Json json = Json::parse(line);
      if (number == 1 || json.find("experiment"))
        made_by = made_by_of_header(json, plan);
      else if (const auto [run, added] = results.insert(result_of(json, made_by)); !added)
        fail("is a second line of the run ", key_of(run->first));
    } catch (const JsonError& e) {
      if (file.eof() && number > 1) break;  // the last line was cut off
      refuse(path, ":", number, ": is no line of results: ", e.what());
    } catch (const Error& e) {
      refuse(path, ":", number, ": ", e.what());
    }
  }
  return results;
}

// ---- checks ---------------------------------------------------------------------------------------------------------
std::vector<Trial> rows_to_check(const Results& results, int n, std::uint64_t seed, double longest) {
  std::vector<Trial> rows;
  for (const auto& [t, o] : results)
    if (o.wall_seconds <= longest) rows.push_back(t);
  for (std::size_t i = 0; i < rows.size(); i++)  // shuffled, as Fisher and Yates do it
    std::swap(rows[i], rows[i + Philox(seed, Stream::shuffle).word(std::uint32_t(i)) % (rows.size() - i)]);
  rows.resize(std::min(rows.size(), std::size_t(n)));
  return rows;
}

// By how much accuracies may differ: 3 standard deviations of the same trial's at the end over its seeds, and always
// `least`.
static double tolerance(const Results& results, const Trial& trial, const Outcome& again, double least) {
  std::vector<double> seeds;
  if (!again.diverged) seeds.push_back(again.accuracy);  // in place of what is recorded, which may be wrong
  for (const auto& [t, o] : results) {
    Trial same = t;
    same.seed = trial.seed;
    if (same == trial && t.seed != trial.seed && !o.diverged) seeds.push_back(o.accuracy);
  }
  const Mean m = mean_of(seeds);
  return std::max(least, m.count > 1 ? 3 * m.error * std::sqrt(double(m.count)) : 0);
}

// Of "0.1.0, git 1a2b3c4, AMD EPYC, oneDNN 2.6.3, AVX2, 1 thread", or without a commit: what comes after the version.
static std::string cpu_of(const std::string& made_by) {
  const auto git = made_by.find(", git ");
  const auto comma = made_by.find(", ", git == made_by.npos ? 0 : git + 2);
  return comma == made_by.npos ? "" : made_by.substr(comma);
}

std::string contradiction(const Results& results, const Trial& trial, const Outcome& again) {
  const Outcome& was = results.at(trial);
  auto said = [](const Outcome& o) { return o.diverged ? "diverged" : json_number(100 * o.accuracy) + " %"; };
  const std::string both =
      "recorded: " + said(was) + " by " + was.made_by + "; now: " + said(again) + " by " + again.made_by;
  if (was.made_by == again.made_by &&
      was.made_by.find("-dirty") == was.made_by.npos) {  // no one commit has what is dirty
    Outcome as_long = again;
    as_long.wall_seconds = was.wall_seconds;
    return line_of(trial, was) == line_of(trial, as_long) ? "" : both + " (not the same bits)";
  }
  const bool same_cpu = cpu_of(was.made_by) == cpu_of(again.made_by);
  const double most = tolerance(results, trial, again, same_cpu ? 0.01 : 0.03);
  const std::string allowed = " (they may differ by " + json_number(100 * most) + " points)";
  if (same_cpu && was.diverged != again.diverged) return both;
  for (std::size_t i = 0; i < std::min(was.evaluations.size(), again.evaluations.size()); i++) {
    const AccuracyAt &a = was.evaluations[i], &b = again.evaluations[i];
    const std::string at = ", evaluation " + std::to_string(i + 1) + ": ";
    if (std::abs(a.epoch - b.epoch) > 1e-6 * b.epoch || std::abs(a.seconds - b.seconds) > 1e-6 * b.seconds)
      return both + at + json_number(a.seconds) + " virtual seconds were recorded, now " + json_number(b.seconds);
    if (same_cpu && std::abs(a.accuracy - b.accuracy) > most)
      return both + at + json_number(100 * a.accuracy) + " % was recorded, now " + json_number(100 * b.accuracy) +
             " %" + allowed;
  }
  if (was.diverged || again.diverged) return "";
  if (std::abs(was.accuracy - again.accuracy) > most) return both + allowed;
  // Runs that end at a target may end sooner or later. Then other pushes were made. The file has seven digits of the
  // participation.
  const bool pushes =
      was.delays == again.delays && std::abs(was.participation - again.participation) <= 1e-6 * again.participation;
  return pushes || was.evaluations.size() != again.evaluations.size()
             ? ""
             : both + ": other delays or another participation";
}

}  // namespace tandem
