// The table of gpu_check: one line for each thing that was checked or measured, on the screen and as JSON. When the
// time is up, what was not reached gets its line, too: no table ends without saying what it lacks.
#pragma once
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "core/backend.h"
#include "core/clock.h"
#include "layers/models/models.h"
#include "layers/train/metrics.h"

namespace tandem::gpu {

class Table {
 public:
  // Lines are added to the file; an empty name: to none. Throws UsageError when it cannot be written or holds something
  // else.
  Table(const std::string& jsonl, double seconds) : seconds_(seconds) {
    if (jsonl.empty()) return;
    check_replaceable("--jsonl", jsonl, "{\"note\":", "such a table");
    file_.reset(std::fopen(jsonl.c_str(), "a"));
    if (!file_) refuse("--jsonl ", jsonl, ": cannot be written: ", std::strerror(errno));
  }

  // Holds when value ≤ bound; what is not a number does not.
  void check(const std::string& what, double value, double bound, const char* unit = "") {
    const bool holds = value <= bound;
    failed_ += !holds;
    std::printf("%-72s %10.3g ≤ %-9.3g %s%s\n", what.c_str(), value, bound, unit, holds ? "" : "  FAILED");
    keep({{"check", what}, {"value", value}, {"bound", bound}, {"holds", std::int64_t(holds)}});
  }
  // The first seven digits say how fast, `share` of which ceiling (none: 0).
  void measured(const std::string& what, double value, const char* unit, double share = 0, const char* of = "") {
    std::printf("%-72s %10.3f %s", what.c_str(), value, unit);
    if (share > 0) std::printf("  %.0f %% of %s", 100 * share, of);
    std::printf("\n");
    MetricFields fields{{"bench", what}, {"value", value}, {"unit", std::string(unit)}};
    if (share > 0) fields.push_back({"share", share});
    keep(fields);
  }
  // False when the time is up; then the line says that `what` was missed.
  bool time_for(const std::string& what) {
    if (seconds_since(begin_) < seconds_) return true;
    missed_++;
    std::printf("%-72s     MISSED: the time was up\n", what.c_str());
    keep({{"missed", what}});
    return false;
  }
  void note(const std::string& text) {
    std::printf("%s\n", text.c_str());
    keep({{"note", text}});
  }
  // Exit status: 1 where a line does not hold, 3: missed some
  int status() const { return failed_ ? 1 : missed_ ? 3 : 0; }

 private:
  void keep(const MetricFields& fields) {
    std::fflush(stdout);
    if (!file_) return;
    if (std::fprintf(file_.get(), "%s\n", json_object(fields).c_str()) < 0 || std::fflush(file_.get()) != 0)
      fail("--jsonl: the table could not be written: ", std::strerror(errno));
  }
  struct Close {
    void operator()(std::FILE* f) const { std::fclose(f); }
  };
  std::unique_ptr<std::FILE, Close> file_;
  double seconds_;
  Clock::time_point begin_ = Clock::now();
  int failed_ = 0, missed_ = 0;
};

// ---- the stages: each on a device, against a host that computes the same --------------------------------------------
struct Machine {
  std::function<std::unique_ptr<Backend>()> device, host;
  bool small = false;  // a device that is none: sizes that a CPU can bear
};
struct Case {  // what is trained, and the budget of memory
  std::string model;
  int side, channels, classes;
  std::int64_t batch;
  std::size_t budget = 0;
  Model make() const { return make_model(model, classes, channels, side); }
  std::string text(DType type) const { return model + " " + name_of(type) + " batch " + std::to_string(batch); }
};
void check_operations(const Machine&, Table&);
void check_ranks(const Machine&, Table&);
void touch_operations(const Machine&, Table&);  // once each, with nothing to compare: for compute-sanitizer
void check_training(const Machine&, Table&);
void measure_speed(const Machine&, Table&);
void check_memory(const Machine&, Table&);

}  // namespace tandem::gpu
