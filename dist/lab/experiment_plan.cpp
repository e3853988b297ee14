// Reads the plan of an experiment. Every error names the file and the line.
#include <algorithm>
#include <filesystem>
#include <set>
#include <sstream>

#include "core/files/files.h"
#include "core/files/json.h"
#include "core/text.h"
#include "datasets/dataset.h"
#include "dist/lab/experiment.h"
#include "dist/server/asynchrony.h"
#include "dist/server/rules.h"
#include "dist/server/straggler_emulation.h"
#include "layers/models/models.h"

namespace tandem {
namespace {

using Kind = Json::Kind;
constexpr int most_workers = 100000;

// Whether the update rule of a strategy keeps a velocity. Throws UsageError for a strategy that the simulator does not
// have.
bool keeps_momentum(const std::string& strategy) {
  check_simulation({.strategy = strategy, .cluster = {.workers = most_workers}});
  if (!Asynchrony::is_one(strategy)) return true;  // all-reduce, and steps of SGD between exchanges
  const Rule::Keeps keeps = make_rule(Asynchrony::parse(strategy).rule)->keeps();
  return keeps.velocity || keeps.own;
}

// "{2,4,8}" and what stands before it: "ringmaster:R="
SearchedStrategy::Constant read_constant(const std::string& text, const std::string& before, const std::string& list) {
  SearchedStrategy::Constant c;
  const std::size_t begin = before.find_last_of(":,+");
  const std::string key = before.substr(begin == before.npos ? 0 : begin + 1);
  c.name = key.empty() ? "H" : key.substr(0, key.find('='));
  c.whole = std::set<std::string>{"R", "B", "H", "every"}.count(c.name) > 0;
  std::stringstream items(list);
  for (std::string item; std::getline(items, item, ',');) {
    const auto value = parsed<double>(item);
    if (!value || *value < 0 || (c.whole && (*value < 1 || *value != std::floor(*value))))
      refuse(text, ": {", list, "} has '", item, "': expected ", c.whole ? "whole numbers from 1" : "numbers from 0",
             " (a row of its own for each setting of an on/off constant)");
    if (std::count(c.values.begin(), c.values.end(), *value)) refuse(text, ": {", list, "} has ", item, " twice");
    c.values.push_back(*value);
  }
  if (c.values.size() < 2) refuse(text, ": {", list, "} needs two values or more: without braces a constant is fixed");
  const double first = c.values[0];
  std::sort(c.values.begin(), c.values.end());
  c.first = int(std::find(c.values.begin(), c.values.end(), first) - c.values.begin());
  return c;
}

// The members of one object of a plan. Each is read by a call with its name; done() refuses those that no call asked
// for.
class Members {
 public:
  Members(const std::string& path, const Json& json, const char* owner) : path_(path), json_(json), owner_(owner) {
    if (!json.is(Kind::object)) wrong(json, owner, " is an object: {\"name\": value, …}");
  }
  template <class... Parts>
  [[noreturn]] void wrong(const Json& at, const Parts&... parts) const {
    refuse(path_, ":", at.line, ": ", parts...);
  }
  const Json* take(const char* name, Kind kind, const char* expected) {
    known_.insert(name);
    const Json* value = json_.find(name);
    if (value && !value->is(kind)) wrong(*value, "\"", name, "\" is not ", expected);
    return value;
  }
  // The text, which `check` may refuse.
  template <class Check>
  void text(const char* name, std::string& to, const Check& check) {
    const Json* v = take(name, Kind::text, "a text");
    if (!v) return;
    to = v->text;
    checked(*v, [&] { check(to); });
  }
  void boolean(const char* name, bool& to) {
    if (const Json* v = take(name, Kind::boolean, "true or false")) to = v->boolean;
  }
  template <class T>
  void number(const char* name, T& to, double low, double high = 1e9) {
    if (const Json* v = take(name, Kind::number, "a number")) to = within<T>(name, *v, low, high);
  }
  // Calls read(item) for each item, which returns what must not come twice.
  template <class Read>
  void list(const char* name, const Read& read, bool required) {
    const Json* v = take(name, Kind::array, "a list");
    if (!v && required) wrong(json_, "\"", name, "\" is missing");
    if (v && v->items.empty()) wrong(*v, "\"", name, "\" is empty");
    std::set<std::string> seen;
    for (const Json& item : v ? v->items : std::vector<Json>{})
      if (const std::string key = read(item); !seen.insert(key).second)
        wrong(item, "\"", name, "\" has ", key, " twice");
  }
  template <class T>
  T within(const char* name, const Json& v, double low, double high) const {
    constexpr bool whole = std::is_integral_v<T>;
    if (!v.is(Kind::number)) wrong(v, "\"", name, "\" has something that is not a number");
    if (!(v.number >= low && v.number <= high) || (whole && v.number != std::floor(v.number)))
      wrong(v, "\"", name, "\" has ", json_number(v.number), ": expected a ", whole ? "whole number" : "number",
            " from ", low, " to ", high);
    return T(v.number);
  }
  template <class Call>
  void checked(const Json& at, const Call& call) const {
    try {
      call();
    } catch (const Error& e) {
      wrong(at, e.what());
    }
  }
  void done() const {
    for (const JsonMember& m : json_.members)
      if (!known_.count(m.name)) wrong(m.value, "\"", m.name, "\" is not a field of ", owner_);
  }

 private:
  const std::string& path_;
  const Json& json_;
  const char* owner_;
  std::set<std::string> known_;
};

std::string read_cluster(const std::string& path, const Json& json, std::vector<PlannedCluster>& to) {
  PlannedCluster c;
  Members m(path, json, "a cluster");
  if (!json.find("name")) m.wrong(json, "\"name\" is missing: every cluster has one");
  m.text("name", c.name, [](const std::string& name) {
    if (name.empty()) refuse("\"name\" is empty");
  });
  m.number("shape", c.shape, 0);
  if (const Json* v = json.find("shape")) m.checked(*v, [&] { check_shape(c.shape); });
  m.number("slow_share", c.slow_share, 0, 1), m.number("slow_factor", c.slow_factor, 1, 1e6);
  m.number("latency", c.latency, 0);
  if (const Json* v = m.take("bandwidth", Kind::number, "a number"))
    c.bandwidth = m.within<double>("bandwidth", *v, 1, 1e15);
  m.done();
  to.push_back(c);
  return "the cluster " + json_quoted(c.name);
}

void check_data_set(const std::string& name) {
  auto plain = [](std::string s) {
    std::erase(s, '-');
    return s;
  };
  std::istringstream names(dataset_names());
  for (std::string known; names >> known;)
    if (plain(known) == plain(name)) return;
  if (name.starts_with("synthetic") || std::filesystem::exists(name)) return;
  refuse("there is no data set \"", name, "\", and no such folder: choose one of ", dataset_names());
}

void read_conditions(Members& m, Plan& p) {
  auto any = [](const std::string&) {};
  m.text("title", p.title, any), m.text("data_set", p.data_set, check_data_set),
      m.text("model", p.model, check_model_name);
  m.text("dtype", p.dtype, [](const std::string& d) {
    if (d != "f32" && d != "bf16") refuse("\"dtype\" is \"", d, "\": expected f32 or bf16");
  });
  m.text("schedule", p.schedule, [](const std::string& s) { Schedule::parse(s); });
  m.boolean("augment", p.augment);
  m.number("epochs", p.epochs, 1), m.number("batch", p.batch, 1), m.number("val", p.val, 1);
  m.number("weight_decay", p.weight_decay, 0), m.number("evaluate_every", p.evaluate_every, 0.001, p.epochs);
  double target = 0;
  m.number("target", target, 0.001, 0.9999);
  if (target > 0) p.target = target;
  std::string choose_by = "accuracy";
  m.text("choose_by", choose_by, [&](const std::string& v) {
    if (v != "accuracy" && v != "time") refuse("accuracy or time is expected");
    if (v == "time" && target == 0) refuse("time needs a \"target\"");
  });
  p.by_time = choose_by == "time";
}

// Rates that share one lattice: each is the first times a power of two, so that doubling and halving meet.
std::string read_rate(Members& m, const Json& item, Plan& p) {
  const double rate = m.within<double>("rates", item, 1e-12, 1e6);
  if (!p.rates.empty()) {
    const double doublings = std::log2(rate / p.rates[0]), whole = std::round(doublings);
    if (std::abs(doublings - whole) > 1e-6)
      m.wrong(item, "\"rates\" has ", json_number(rate), ", which is not ", json_number(p.rates[0]),
              " times a power of two");
    p.rates.push_back(std::ldexp(p.rates[0], int(whole)));
  } else {
    p.rates.push_back(rate);
  }
  return json_number(rate);
}

void read_cells(const std::string& path, Members& m, Plan& p) {
  m.list(
      "strategies",
      [&](const Json& item) {
        if (!item.is(Kind::text)) m.wrong(item, "\"strategies\" has something that is not a text");
        m.checked(item, [&] { p.strategies.push_back(SearchedStrategy::parse(item.text)); });
        return item.text;
      },
      true);
  m.list(
      "workers",
      [&](const Json& item) {
        p.workers.push_back(m.within<int>("workers", item, 1, most_workers));
        return json_number(item.number);
      },
      true);
  if (m.take("clusters", Kind::array, "a list")) p.clusters.clear();
  m.list(
      "clusters", [&](const Json& item) { return read_cluster(path, item, p.clusters); }, false);
  m.list(
      "rates", [&](const Json& item) { return read_rate(m, item, p); }, true);
  if (m.take("momenta", Kind::array, "a list")) p.momenta.clear();
  m.list(
      "momenta",
      [&](const Json& item) {
        p.momenta.push_back(m.within<double>("momenta", item, 0, 0.9999));
        return json_number(item.number);
      },
      false);
}

}  // namespace

SearchedStrategy SearchedStrategy::parse(const std::string& text) {
  SearchedStrategy s;
  s.text = text;
  std::size_t at = 0;
  for (std::size_t open = text.find('{'); open != text.npos; open = text.find('{', at)) {
    const std::size_t close = text.find('}', open);
    if (close == text.npos) refuse(text, ": a brace is not closed");
    s.pieces.push_back(text.substr(at, open - at));
    s.constants.push_back(read_constant(text, s.pieces.back(), text.substr(open + 1, close - open - 1)));
    at = close + 1;
  }
  s.pieces.push_back(text.substr(at));
  const std::vector<double> values = s.first();
  s.momentum = keeps_momentum(s.filled(values));
  for (std::size_t i = 0; i < s.constants.size(); i++)
    for (double v : s.constants[i].values) {
      std::vector<double> one = values;
      one[i] = v;
      keeps_momentum(s.filled(one));
    }
  return s;
}

std::vector<double> SearchedStrategy::first() const {
  std::vector<double> values;
  for (const Constant& c : constants) values.push_back(c.values[std::size_t(c.first)]);
  return values;
}

std::string SearchedStrategy::filled(const std::vector<double>& values) const {
  std::string all = pieces[0];
  for (std::size_t i = 0; i < values.size(); i++) all += digits(values[i], 6) + pieces[i + 1];
  return all;
}

std::optional<double> SearchedStrategy::Constant::at(int i) const {
  const int n = int(values.size());
  if (i >= 0 && i < n) return values[std::size_t(i)];
  const bool up = i >= n;
  double value = up ? values.back() : values[0];
  const double inner = up ? values[std::size_t(n) - 2] : values[1], ratio = value > 0 && inner > 0 ? value / inner
                                                                            : up                   ? 2
                                                                                                   : 0;
  for (int step = up ? i - n + 1 : -i; step > 0; step--) {
    const double next = value * ratio;
    value = !whole ? next : up ? std::max(value + 1, std::round(next)) : std::min(value - 1, std::round(next));
  }
  if (value < (whole ? 1 : 1e-12)) return {};
  return value;
}

VirtualCluster PlannedCluster::of(int workers) const {
  VirtualCluster c;
  c.workers = workers;
  c.shape = shape;
  c.latency = latency;
  c.bandwidth = bandwidth;
  for (int w = workers - int(slow_share * workers + 1e-9); w < workers; w++) c.slower[w] = slow_factor;
  return c;
}

// What each field allows and both together do not.
static void check_together(const std::string& path, const Json& json, const Plan& p) {
  const auto wrong = [&](const char* field, const auto&... why) {
    refuse(path, ":", json.find(field)->line, ": ", why...);
  };
  for (const PlannedCluster& c : p.clusters) {
    for (int k : p.workers)
      if (k > 1 && c.slow_share > 0 && c.of(k).slower.empty())
        wrong("clusters", "cluster ", c.name, ": a share of ", c.slow_share, " of ", k,
              " workers is none. Choose a larger \"slow_share\"");
    if ((c.slow_share > 0) != (c.slow_factor > 1))
      wrong("clusters", "cluster ", c.name,
            ": \"slow_share\" above 0 and \"slow_factor\" above 1 have an effect only together");
  }
  for (const SearchedStrategy& s : p.strategies)
    for (int k : p.workers) try {
        check_simulation({.strategy = s.filled(s.first()), .cluster = {.workers = k}});
      } catch (const UsageError& e) {
        wrong("strategies", e.what());
      }
  const double warmup = Schedule::parse(p.schedule).warmup;
  if (warmup >= p.tuning_epochs)
    wrong("schedule", "a warm-up of ", warmup, " epochs does not end in a run of ", p.tuning_epochs,
          ". Choose a shorter one, or more epochs");
  if (p.by_time && p.tuning_epochs != p.epochs && p.schedule != "constant")
    wrong("choose_by", "the times of searches and of final runs belong to two schedules, of ", p.tuning_epochs,
          " and of ", p.epochs, " epochs. Choose the constant schedule, or as many \"tuning_epochs\"");
}

Plan read_plan(const std::string& path) {
  Json json;
  try {
    json = Json::parse(read_file(path));
  } catch (const JsonError& e) {
    refuse(path, ":", e.line, ": ", e.what());
  }
  Plan p;
  Members m(path, json, "a plan");
  read_conditions(m, p);
  read_cells(path, m, p);
  m.number("tuning_epochs", p.tuning_epochs, 0, p.epochs), m.number("tuning_seeds", p.tuning_seeds, 1, 1000);
  m.number("tuning_seed", p.tuning_seed, 1001);
  m.number("finalists", p.finalists, 1, 1000), m.number("seeds", p.seeds, 1, 1000);
  p.search = std::max(p.search, int(p.rates.size()));
  m.number("search", p.search, double(p.rates.size()), 1e6);
  m.done();
  std::sort(p.rates.begin(), p.rates.end());
  if (p.tuning_epochs == 0) p.tuning_epochs = p.epochs;
  check_together(path, json, p);
  if (p.title.empty()) p.title = std::filesystem::path(path).stem().string();
  return p;
}

}  // namespace tandem
