#include "dist/lab/experiment.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <thread>

#include "core/error.h"
#include "core/files/files.h"
#include "core/files/json.h"
#include "core/text.h"

namespace tandem {
namespace {

constexpr std::uint64_t first_tuning_seed = 1001;  // final runs have 1, 2, …

// Gives `take` the member `name`, if it is there, and forgets it; what is left in the end is unknown.
class Members {
 public:
  Members(const std::string& path, const Json& json) : path_(path), json_(json) {
    for (const auto& m : json.members) left_.insert(m.name);
  }
  const Json* take(const char* name, Json::Kind kind, const char* expected) {
    left_.erase(name);
    const Json* value = json_.find(name);
    if (value && !value->is(kind)) refuse(path_, ": \"", name, "\" is not ", expected);
    return value;
  }
  void text(const char* name, std::string& to) {
    if (const Json* v = take(name, Json::Kind::text, "a text")) to = v->text;
  }
  template <class T>
  void number(const char* name, T& to, double low, double high = 1e9) {
    if (const Json* v = take(name, Json::Kind::number, "a number")) to = within<T>(name, "is", v->number, low, high);
  }
  template <class T>
  void list(const char* name, std::vector<T>& to) {
    const Json* v = take(name, Json::Kind::array, "a list");
    if (!v) return;
    for (const Json& item : v->items) {
      constexpr bool texts = std::is_same_v<T, std::string>;
      if (!item.is(texts ? Json::Kind::text : Json::Kind::number))
        refuse(path_, ": \"", name, "\" has something else in it");
      if constexpr (texts) {
        to.push_back(item.text);
      } else {
        to.push_back(within<T>(name, "has", item.number, std::is_integral_v<T> ? 1 : 1e-12, 1e9));
      }
    }
  }
  void done() const {
    for (const std::string& name : left_) refuse(path_, ": \"", name, "\" is nothing that a plan has");
  }

 private:
  template <class T>
  T within(const char* name, const char* has, double value, double low, double high) const {
    constexpr bool whole = std::is_integral_v<T>;
    if (!(value >= low && value <= high) || (whole && value != std::floor(value)))
      refuse(path_, ": \"", name, "\" ", has, " ", json_number(value), ": expected a ", whole ? "whole number" : "number", " from ",
             low, " to ", high);
    return T(value);
  }

  const std::string& path_;
  const Json& json_;
  std::set<std::string> left_;
};

std::string numbers(const std::vector<double>& values) {
  std::string text = "[";
  for (double v : values) text += (text.size() > 1 ? "," : "") + json_number(v);
  return text + "]";
}
std::vector<double> numbers(const Json* array) {
  std::vector<double> values;
  if (array)
    for (const Json& v : array->items) values.push_back(v.number);
  return values;
}

// What all its runs have in common: results under other conditions are not its own.
std::string conditions(const Plan& p) {
  std::ostringstream text;
  text << p.data_set << ", " << p.model << ", " << p.dtype << ", " << p.schedule << ", " << p.epochs
       << " epochs, batch " << p.batch << ", " << p.val << " held back, momentum " << p.momentum << ", weight decay "
       << p.weight_decay << ", shape " << p.shape << (p.augment ? ", augmented" : "");
  return text.str();
}

std::string line_of(const Trial& t, const Outcome& o) {
  std::ostringstream line;
  line << "{\"strategy\":" << json_quoted(t.strategy) << ",\"workers\":" << t.workers
       << ",\"rate\":" << json_number(t.rate) << ",\"epochs\":" << t.epochs << ",\"seed\":" << t.seed
       << ",\"final\":" << t.final << ",\"validation\":" << json_number(o.validation)
       << ",\"test\":" << json_number(o.test) << ",\"diverged\":" << o.diverged << ",\"gap\":" << json_number(o.gap)
       << ",\"correction\":" << json_number(o.correction) << ",\"participation\":" << json_number(o.participation) << ",\"accuracies\":" << numbers(o.accuracies)
       << ",\"seconds\":" << numbers(o.seconds) << ",\"delays\":" << numbers(o.delays) << "}\n";
  return line.str();
}

std::optional<std::pair<Trial, Outcome>> result_of(const Json& json) {
  auto number = [&](const char* name) {
    const Json* v = json.find(name);
    return v ? v->number : 0;
  };
  const Json* strategy = json.find("strategy");
  if (!strategy) return {};
  return std::pair(Trial{strategy->text, int(number("workers")), number("rate"), int(number("epochs")),
                         std::uint64_t(number("seed")), number("final") != 0},
                   Outcome{.validation = number("validation"),
                           .test = number("test"),
                           .diverged = number("diverged") != 0,
                           .accuracies = numbers(json.find("accuracies")),
                           .seconds = numbers(json.find("seconds")),
                           .delays = numbers(json.find("delays")),
                           .gap = number("gap"),
                           .correction = number("correction"),
                           .participation = json.find("participation") ? number("participation") : 1});
}

bool near(double a, double b) { return std::abs(a - b) < 1e-6 * std::abs(b); }  // rates go through text

const Outcome* find(const Results& results, const Trial& t) {
  for (const auto& [done, outcome] : results)
    if (done.strategy == t.strategy && done.workers == t.workers && near(done.rate, t.rate) &&
        done.epochs == t.epochs && done.seed == t.seed && done.final == t.final)
      return &outcome;
  return nullptr;
}

// ---- the search for a learning rate, as what it still lacks --------------------------------------------------------------
// Replays the search over the results that there are. Either the next trials are missing, or the rate is known.
struct Search {
  std::vector<Trial> missing;
  double rate = 0;
};

Search search(const Plan& plan, const Results& results, const std::string& strategy, int workers) {
  Search s;
  const int longest = plan.tuning_epochs ? plan.tuning_epochs : plan.epochs;
  // Of the numbers that the plan names before this one, the nearest, as the ratio goes.
  const auto first = plan.workers.begin(), here = std::find(first, plan.workers.end(), workers);
  double nearest_rate = 0;
  if (here != first) {
    auto far = [&](int k) { return std::abs(std::log(double(k) / workers)); };
    const int nearest = *std::min_element(first, here, [&](int a, int b) { return far(a) < far(b); });
    s = search(plan, results, strategy, nearest);
    if (!s.missing.empty()) return s;
    nearest_rate = s.rate;
  }
  auto score = [&](double rate, int epochs) {  // mean over the tuning seeds
    double sum = 0;
    for (int k = 0; k < plan.tuning_seeds; k++) {
      const Trial t{strategy, workers, rate, epochs, first_tuning_seed + std::uint64_t(k), false};
      if (const Outcome* o = find(results, t))
        sum += o->validation;
      else
        s.missing.push_back(t);
    }
    return sum;
  };
  double best = nearest_rate;
  if (best == 0) {
    std::vector<double> rates = plan.rates;
    for (int epochs : std::set<int>{std::max(1, longest / 4), std::max(1, longest / 2)}) {
      if (epochs == longest) break;
      std::vector<std::pair<double, double>> scored;
      for (double r : rates) scored.push_back({score(r, epochs), r});
      if (!s.missing.empty()) return s;
      std::stable_sort(scored.begin(), scored.end(), [](auto& a, auto& b) { return a.first > b.first; });
      rates.clear();
      for (std::size_t i = 0; i < scored.size() && i < std::max<std::size_t>(2, (scored.size() + 1) / 2); i++)
        rates.push_back(scored[i].second);
    }
    std::vector<std::pair<double, double>> scored;
    for (double r : rates) scored.push_back({score(r, longest), r});
    if (!s.missing.empty()) return s;
    best = std::max_element(scored.begin(), scored.end(), [](auto& a, auto& b) { return a.first < b.first; })->second;
  }
  // From the best by factors of two, up and down, while that is better.
  double at_best = score(best, longest);
  const double above = score(2 * best, longest), below = score(best / 2, longest);
  if (!s.missing.empty()) return s;
  const double factor = above >= below ? 2 : 0.5;
  for (int steps = 0; steps < 12; steps++) {
    const double next = score(best * factor, longest);
    if (!s.missing.empty()) return s;
    if (next <= at_best) break;
    best *= factor, at_best = next;
  }
  s.rate = best;
  return s;
}

}  // namespace

Plan read_plan(const std::string& path) {
  Json json;
  try {
    json = Json::parse(read_file(path));
  } catch (const UsageError&) {
    throw;
  } catch (const Error& e) {
    refuse(path, ": ", e.what());
  }
  if (!json.is(Json::Kind::object)) refuse(path, ": is not a plan: {\"strategies\": […], \"workers\": […], …}");
  Plan p;
  Members m(path, json);
  m.text("title", p.title), m.text("data_set", p.data_set), m.text("model", p.model), m.text("dtype", p.dtype);
  m.text("schedule", p.schedule);
  m.number("epochs", p.epochs, 1), m.number("batch", p.batch, 1), m.number("val", p.val, 1);
  m.number("momentum", p.momentum, 0, 0.9999), m.number("weight_decay", p.weight_decay, 0), m.number("shape", p.shape, 0);
  if (const Json* v = m.take("augment", Json::Kind::boolean, "true or false")) p.augment = v->boolean;
  m.list("strategies", p.strategies), m.list("workers", p.workers), m.list("rates", p.rates);
  m.number("tuning_seeds", p.tuning_seeds, 1), m.number("tuning_epochs", p.tuning_epochs, 0), m.number("seeds", p.seeds, 1);
  m.done();
  if (p.strategies.empty() || p.workers.empty() || p.rates.empty())
    refuse(path, ": \"strategies\", \"workers\" and \"rates\" must each name one at least");
  if (p.tuning_epochs > p.epochs)
    refuse(path, ": \"tuning_epochs\" is ", p.tuning_epochs, ", more than the ", p.epochs, " of \"epochs\"");
  std::sort(p.rates.begin(), p.rates.end());
  auto twice = [&](const auto& list, const char* name) {
    for (std::size_t i = 0; i < list.size(); i++)
      if (std::find(list.begin(), list.begin() + std::ptrdiff_t(i), list[i]) != list.begin() + std::ptrdiff_t(i))
        refuse(path, ": \"", name, "\" names ", list[i], " twice");
  };
  twice(p.strategies, "strategies"), twice(p.workers, "workers"), twice(p.rates, "rates");
  if (p.title.empty()) p.title = std::filesystem::path(path).stem().string();
  return p;
}

Results read_results(const std::string& path, const Plan& plan) {
  Results results;
  std::error_code none;
  if (std::filesystem::exists(path, none) && !std::filesystem::is_regular_file(path, none))
    refuse(path, ": is not a regular file: name one for the results");
  std::ifstream file(path);
  std::string line;
  for (bool first = true; std::getline(file, line); first = false) {
    Json json;
    try {
      json = Json::parse(line);
    } catch (const Error&) {  // cut off, or empty
      if (first) refuse(path, ": is no file of results");
      continue;
    }
    if (!first) {
      if (auto r = result_of(json)) results.push_back(std::move(*r));
      continue;
    }
    const Json* of = json.find("experiment");
    if (!of) refuse(path, ": is no file of results");
    if (of->text != conditions(plan))
      refuse(path, ": holds results of another experiment (", of->text, "; here: ", conditions(plan), "): move it away");
  }
  return results;
}

double chosen_rate(const Plan& plan, const Results& results, const std::string& strategy, int workers) {
  return search(plan, results, strategy, workers).rate;
}

namespace {
// A last line that was cut off goes: it holds no run, and must not swallow the next one.
void end_with_a_line(const std::string& path, std::ofstream& file) {
  const std::string all = read_file(path);
  const std::size_t begin = all.rfind('\n') + 1;
  if (begin == all.size()) return;
  try {
    Json::parse(all.substr(begin));
    file << "\n" << std::flush;
  } catch (const Error&) {
    std::filesystem::resize_file(path, begin);
  }
}

// What is to be done next, of what is not under way; empty: nothing, for now or (done) for ever.
std::optional<Trial> next_trial(const Plan& plan, const Results& results, const std::vector<Trial>& under_way, bool& done) {
  done = true;
  for (int workers : plan.workers)
    for (const std::string& strategy : plan.strategies) {
      Search s = search(plan, results, strategy, workers);
      if (s.missing.empty())
        for (int k = 1; k <= plan.seeds; k++)
          s.missing.push_back({strategy, workers, s.rate, plan.epochs, std::uint64_t(k), true});
      for (const Trial& t : s.missing) {
        if (find(results, t)) continue;
        done = false;
        if (std::find(under_way.begin(), under_way.end(), t) == under_way.end()) return t;
      }
    }
  return {};
}

}  // namespace

Results carry_out(const Plan& plan, const std::string& path, int jobs, const std::function<Outcome(const Trial&)>& run,
                  const std::function<void(const Trial&, const Outcome&)>& ended) {
  Results results = read_results(path, plan);
  FileLock lock;
  const bool fresh = !std::filesystem::exists(path) || std::filesystem::file_size(path) == 0;
  std::ofstream file(path, std::ios::app);
  if (!file) refuse(path, ": ", cannot_write(path, errno));
  lock.take(path, path, "writes its results there");
  if (fresh)
    file << "{\"experiment\":" << json_quoted(conditions(plan)) << "}\n" << std::flush;
  else
    end_with_a_line(path, file);

  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Trial> under_way;
  std::exception_ptr failed;
  auto work = [&] {
    std::unique_lock lock_here(mutex);
    for (;;) {
      bool done = false;
      if (failed) return;
      std::optional<Trial> t = next_trial(plan, results, under_way, done);
      if (done) return;
      if (!t) {
        changed.wait(lock_here);
        continue;
      }
      under_way.push_back(*t);
      lock_here.unlock();
      std::optional<Outcome> o;
      std::exception_ptr error;
      try {
        o = run(*t);
      } catch (...) {
        error = std::current_exception();
      }
      lock_here.lock();
      under_way.erase(std::find(under_way.begin(), under_way.end(), *t));
      if (o) {
        results.push_back({*t, *o});
        file << line_of(*t, *o) << std::flush;
        if (!file && !failed) failed = std::make_exception_ptr(Error(path + ": cannot be written: is the disk full?"));
        ended(*t, *o);
      } else if (!failed) {
        failed = error;
      }
      changed.notify_all();
    }
  };
  std::vector<std::thread> threads;
  for (int j = 0; j < jobs; j++) threads.emplace_back(work);
  for (auto& t : threads) t.join();
  if (failed) std::rethrow_exception(failed);
  return results;
}

}  // namespace tandem
