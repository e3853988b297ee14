#include <algorithm>
#include <cstdio>
#include <list>
#include <string_view>

#include "autograd/tape.h"
#include "core/backend.h"
#include "core/files/files.h"
#include "core/text.h"
#include "layers/export/summary.h"
#include "layers/train/run.h"

namespace tandem {
namespace {

using Bytes = std::map<std::string, std::size_t>;  // by name

// A table of the largest entries: the tensors that operations or modules keep for backward.
std::string largest(const std::string& what, const Bytes& by) {
  constexpr std::size_t most = 10;
  std::vector<std::pair<std::string, std::size_t>> sorted(by.begin(), by.end());
  std::stable_sort(sorted.begin(), sorted.end(), [](auto& a, auto& b) { return a.second > b.second; });
  std::vector<std::vector<std::string>> lines;
  std::size_t all = 0, rest = 0;
  for (const auto& [name, bytes] : sorted) {
    all += bytes;
    if (lines.size() < most)
      lines.push_back({"  " + name, readable_bytes(double(bytes))});
    else
      rest += bytes;
  }
  if (rest) lines.push_back({printed("  %zu more", sorted.size() - most), readable_bytes(double(rest))});
  return "kept for backward by " + what + ": " + readable_bytes(double(all)) + "\n" + aligned(lines, 1);
}

// RunConfig::profiler. Only rank 0 prints and writes; the other ranks send it their traces.
class ShowSteps : public Callback {
 public:
  // Throws UsageError before the training if a file cannot be written, or contains something else.
  explicit ShowSteps(Run& run) : options_(run.options.profiler), memory_of_(run.backend.memory()) {
    if (!run.first_rank)
      options_ = {.dot = {}, .trace = options_.trace, .warm_up = options_.warm_up, .steps = options_.steps};
    // A short run shows fewer steps, but at least one. The first step is shown only if there is no other.
    const std::int64_t all = run.last_step - run.position.step;
    options_.steps = std::max<std::int64_t>(1, std::min(options_.steps, all - 1));
    first_ = run.position.step + std::max<std::int64_t>(0, std::min(options_.warm_up, all - options_.steps));
    check_output("--dot", options_.dot, "digraph tape", "a picture of a tape");
    if (run.first_rank) check_output("--trace", options_.trace, "began_unix_us", "a trace");
    if (!options_.profile && options_.trace.empty()) return;
    trace_.emplace("tandem", run.strategy.rank());
    for (const char* lane : {"step", "forward", "backward", "optimizer", "evaluation"}) trace_->lane(lane);
    trace_->record(false);
    follower_ = run.backend.follower();
    if (follower_) trace_->follow(follower_.get());
    lane_.emplace(&*trace_, "step");
    if (options_.trace.empty() || run.strategy.size() == 1) return;
    trace_->name(run.strategy.where());
    clock_ = run.strategy.watch(*trace_);
  }

  void begin(Run& run) override {
    if (!options_.summary) return;
    Alone alone;
    const Tensor images = run.data.train.make(0, 0).images;
    ModelSummary s = summary(run.model, images.shape(), images.dtype());
    s.state = run.optimizer.name() + (run.ema ? " and the average" : "");
    s.state_bytes = run.ema ? run.ema->values.bytes() + run.ema->buffers.bytes() : 0;
    for (const auto& [name, vector] : run.optimizer.vectors()) s.state_bytes += vector.bytes();
    std::printf("%s", s.text().c_str());
    std::fflush(stdout);
  }

  void phase(Run& run, const char* name, bool begins) override {
    const std::string_view which = name;
    if (which == "step") {
      step_.reset();
      if (begins) begin_step(run.position.step);
      return;
    }
    if (begins) {
      if (which == "evaluation" && trace_) trace_->record(!std::exchange(evaluated_, true) && !options_.trace.empty());
      open_.emplace_back(trace_ ? &*trace_ : nullptr, name);
      if (shows_memory()) memory_of_.reset_peak();
      return;
    }
    open_.pop_back();
    if (which == "evaluation" && trace_) trace_->record(false);
    if (which != "evaluation" && shows_memory()) {
      after_ = memory_of_.statistics();
      phases_ += printed("  %-10s peak %10s: ", name, readable_bytes(double(after_.peak_bytes)).c_str()) +
                 by_use(after_.at_peak) + "\n";
    }
    if (which == "forward") show_tape(run.batch_loss);
  }
  // A step that is replayed on a device cannot be observed.
  bool looks_inside(const Run&) const override {
    return (trace_ && trace_->recording()) || (!options_.dot.empty() && !drawn_) || shows_memory();
  }

  void end(Run& run) override {
    if (follower_) {
      trace_->collect();
      trace_->follow(nullptr);
    }
    if (trace_) trace_->record(false);
    if (options_.profile) std::printf("%s", profile_of(*trace_).text().c_str());
    if (options_.memory) std::printf("%s", memory().c_str());
    auto nothing = [](const char* option, const std::string& file) {
      std::fprintf(stderr, "%s %s: not written, since no step that it would show was made\n", option, file.c_str());
    };
    std::vector<std::string> others;
    if (!options_.trace.empty() && run.strategy.size() > 1) {
      others = run.strategy.gather(run.first_rank ? "" : trace_->events(clock_.ns));
      std::erase(others, "");  // the entries of rank 0 and of lost ranks
    }
    if (!options_.trace.empty() && run.first_rank)
      current_ >= first_ ? trace_->write(options_.trace, others) : nothing("--trace", options_.trace);
    if (!options_.dot.empty() && !drawn_) nothing("--dot", options_.dot);
    std::fflush(stdout);
    options_ = {};
  }

 private:
  void begin_step(std::int64_t number) {
    current_ = number;
    if (trace_) {
      trace_->collect();
      trace_->record(number >= first_ && number < first_ + options_.steps);
    }
    if (Trace::Lane* lane = tracing()) lane->counter("bytes in use", double(memory_of_.statistics().live_bytes));
    step_.emplace("step", "phase", nullptr, number);
  }
  void show_tape(const Variable& loss) {
    if (!options_.dot.empty() && !std::exchange(drawn_, true)) write_dot(loss, options_.dot);
    if (!shows_memory()) return;
    for (const TapeEntry& e : tape_of(loss)) {
      if (e.saved_bytes == 0) continue;
      by_op_[e.node->op] += e.saved_bytes;
      by_module_[e.node->scope->empty() ? "(model)" : *e.node->scope] += e.saved_bytes;
    }
  }
  std::string memory() const {
    if (phases_.empty()) return "memory: no step was looked at\n";
    const std::size_t live = after_.live_bytes, reserved = after_.reserved_bytes;
    return "memory in one step\n" + phases_ + "  after it " + readable_bytes(double(live)) + " in use, " +
           readable_bytes(double(reserved - std::min(reserved, live))) + " cached and free\n" +
           largest("operation", by_op_) + largest("module", by_module_);
  }
  bool shows_memory() const { return options_.memory && current_ + 1 == first_ + options_.steps; }

  struct Phase {  // while it runs
    Phase(Trace* trace, const char* name) : lane(trace, name), span(name) {}
    OnLane lane;
    Span span;
  };
  ProfilerOptions options_;
  CachingAllocator& memory_of_;
  std::int64_t first_ = 0, current_ = -1;  // the first step that is shown; the current step
  bool drawn_ = false, evaluated_ = false;
  std::unique_ptr<Follower> follower_;  // of the device, if it is one
  std::optional<Trace> trace_;
  std::optional<OnLane> lane_;
  Strategy::ClockOffset clock_;
  std::string phases_;       // a line for each phase of the step whose memory is shown
  MemoryStatistics after_;   // after the last phase
  Bytes by_op_, by_module_;  // kept for backward
  std::optional<Span> step_;
  std::list<Phase> open_;
};

}  // namespace

std::shared_ptr<Callback> profile(Run& run) { return std::make_shared<ShowSteps>(run); }

}  // namespace tandem
