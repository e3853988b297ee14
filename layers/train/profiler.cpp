#include "layers/train/profiler.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "autograd/tape.h"
#include "core/backend.h"
#include "core/files/atomic_file.h"
#include "core/files/files.h"
#include "core/text.h"

namespace tandem {

// ---- where the time goes --------------------------------------------------------------------------------------------
Profile profile_of(const Trace& trace) {
  Profile p;
  std::map<std::pair<std::string, std::string>, ProfileRow> fine;
  std::map<std::string, ProfileRow> coarse;
  auto is = [](const char* a, const char* b) { return std::strcmp(a, b) == 0; };
  const std::string prefix = trace.find("device: step") ? "device: " : "";
  for (const auto& lane : trace.lanes()) {
    const bool forward = lane->name() == prefix + "forward", backward = lane->name() == prefix + "backward",
               step = lane->name() == prefix + "step";
    if (!prefix.empty() && !lane->name().starts_with(prefix)) continue;
    for (std::size_t i = 0; i < lane->size(); i++) {
      const Trace::Event& e = (*lane)[i];
      const double ms = double(e.end - e.begin) / 1e6;
      if (is(e.kind, "phase")) {
        if (is(e.name, "step")) p.steps++, p.step_ms += ms;
        if (is(e.name, "forward")) p.forward_ms += ms;
        if (is(e.name, "backward")) p.backward_ms += ms;
        if (is(e.name, "optimizer")) p.optimizer_ms += ms;
      } else if (is(e.kind, "wait") && step) {
        p.wait_ms += ms;
      } else if (is(e.kind, "op") && (forward || backward)) {
        const std::string module = e.where ? *e.where : "";
        for (ProfileRow* row : {&fine[{e.name, module}], &coarse[e.name]}) {
          row->op = e.name;
          row->calls += forward;
          (forward ? row->forward_ms : row->backward_ms) += ms;
          row->flops += e.flops;
          row->bytes += e.bytes;
        }
        fine[{e.name, module}].module = module;
      }
    }
  }
  const double n = double(std::max<std::int64_t>(1, p.steps));
  for (double* v : {&p.step_ms, &p.wait_ms, &p.forward_ms, &p.backward_ms, &p.optimizer_ms}) *v /= n;
  auto take = [&](std::vector<ProfileRow>& rows, ProfileRow row) {
    for (double* v : {&row.calls, &row.forward_ms, &row.backward_ms, &row.flops, &row.bytes}) *v /= n;
    rows.push_back(row);
  };
  for (auto& [key, row] : fine) take(p.by_module, row);
  for (auto& [key, row] : coarse) take(p.by_op, row);
  for (auto* rows : {&p.by_module, &p.by_op})
    std::stable_sort(rows->begin(), rows->end(), [](const ProfileRow& a, const ProfileRow& b) {
      return a.forward_ms + a.backward_ms > b.forward_ms + b.backward_ms;
    });
  return p;
}

std::string Profile::text(std::size_t rows) const {
  if (steps == 0) return "profile: no step was looked at\n";
  const double whole = step_ms + wait_ms, operations = forward_ms + backward_ms;
  std::string out = printed("profile of %s, ms per step\n", counted(steps, "step").c_str());
  auto phase = [&](const char* name, double ms) {
    out += printed("  %-28s %9.3f  %5.1f %%\n", name, ms, 100 * ms / std::max(1e-12, whole));
  };
  phase("waiting for a batch", wait_ms);
  phase("forward", forward_ms);
  phase("backward", backward_ms);
  phase("optimizer", optimizer_ms);
  phase("rest of the step", step_ms - operations - optimizer_ms);
  auto table = [&](const std::vector<ProfileRow>& list, bool modules) {
    std::size_t wide = 6;
    for (std::size_t i = 0; i < std::min(rows, list.size()); i++) wide = std::max(wide, list[i].module.size());
    const int w = modules ? int(std::min<std::size_t>(wide, 40)) : 0;
    out += printed("%-16s %-*s %6s %9s %9s %7s  %s\n", "operation", w, modules ? "module" : "", "calls", "forward",
                   "backward", "share", "rate");
    double rest = 0;
    for (std::size_t i = 0; i < list.size(); i++) {
      const ProfileRow& r = list[i];
      const double ms = r.forward_ms + r.backward_ms;
      if (i >= rows) {
        rest += ms;
        continue;
      }
      // A reshape moves nothing, however large its tensor.
      std::string rate = ms <= 0                            ? ""
                         : r.flops > 0                      ? printed("%.0f GFLOP/s", r.flops / ms / 1e6)
                         : r.bytes > 0 && r.op != "reshape" ? printed("%.1f GB/s", r.bytes / ms / 1e6)
                                                            : "";
      out += printed("%-16s %-*s %6.4g %9.3f %9.3f %5.1f %%  %s\n", r.op.c_str(), w, r.module.c_str(), r.calls,
                     r.forward_ms, r.backward_ms, 100 * ms / std::max(1e-12, operations), rate.c_str());
    }
    if (list.size() > rows)
      out += printed("and %zu more: %.3f ms, %.1f %%\n", list.size() - rows, rest,
                     100 * rest / std::max(1e-12, operations));
  };
  out += "\n";
  table(by_op, false);
  out += "\n";
  table(by_module, true);
  return out;
}

// ---- who holds the memory -------------------------------------------------------------------------------------------
std::string MemoryReport::text(std::size_t rows) const {
  if (phases.empty()) return "memory: no step was looked at\n";
  std::string out = "memory in one step\n";
  for (const Phase& p : phases)
    out +=
        printed("  %-10s peak %10s: ", p.name.c_str(), readable_bytes(double(p.peak_bytes)).c_str()) + p.holders + "\n";
  out += "  after it " + readable_bytes(double(live_bytes)) + " in use, " +
         readable_bytes(double(reserved_bytes - std::min(reserved_bytes, live_bytes))) + " cached and free\n";
  auto list = [&](const char* what, const std::map<std::string, std::size_t>& by) {
    std::vector<std::pair<std::string, std::size_t>> sorted(by.begin(), by.end());
    std::stable_sort(sorted.begin(), sorted.end(), [](auto& a, auto& b) { return a.second > b.second; });
    out += "kept for backward by " + std::string(what) + ": " + readable_bytes(double(saved_bytes)) + "\n";
    std::size_t rest = 0;
    for (std::size_t i = 0; i < sorted.size(); i++) {
      if (i < rows)
        out += printed("  %-28s %10s\n", sorted[i].first.c_str(), readable_bytes(double(sorted[i].second)).c_str());
      else
        rest += sorted[i].second;
    }
    if (rest) out += printed("  %zu more %31s\n", sorted.size() - rows, readable_bytes(double(rest)).c_str());
  };
  list("operation", by_op);
  list("module", by_module);
  return out;
}

// ---- the profiler ---------------------------------------------------------------------------------------------------
Profiler::Profiler(ProfilerOptions options, Backend& backend, int rank, std::int64_t begin, std::int64_t end)
    : options_(std::move(options)), backend_(backend), rank_(rank) {
  if (rank != 0) options_ = {.dot = {}, .trace = options_.trace, .warm_up = options_.warm_up, .steps = options_.steps};
  // A short run has fewer steps to spare: at least one is looked at, and the first only when there is no other.
  const std::int64_t there = end - begin;
  options_.steps = std::max<std::int64_t>(1, std::min(options_.steps, there - 1));
  first_ = begin + std::max<std::int64_t>(0, std::min(options_.warm_up, there - options_.steps));
  if (!options_.dot.empty()) check_replaceable("--dot", options_.dot, "digraph tape", "a picture of a tape");
  if (!options_.trace.empty() && rank == 0) check_replaceable("--trace", options_.trace, "began_unix_us", "a trace");
  for (const std::string& file : {options_.dot, options_.trace})
    if (!file.empty() && rank == 0) AtomicFile probe(file);  // without commit() nothing changes
  if (options_.profile || !options_.trace.empty()) {
    trace_.emplace("tandem", rank);
    for (const char* lane : {"step", "forward", "backward", "optimizer", "evaluation"}) trace_->lane(lane);
    trace_->record(false);
    follower_ = backend_.follower();
    if (follower_) trace_->follow(follower_.get());
  }
}

void Profiler::share(Strategy& strategy) {
  if (options_.trace.empty() || strategy.size() == 1) return;
  trace_->name(strategy.where());
  strategy_ = &strategy;
  clock_ = strategy.watch(*trace_);
}

void Profiler::before(Module& model, const Tensor& images, const TrainingState& state) {
  if (!options_.summary) return;
  ModelSummary s = summary(model, images.shape(), images.dtype());
  s.state = state;
  std::printf("%s", s.text().c_str());
  std::fflush(stdout);
}

void Profiler::step(std::int64_t number) {
  step_ = number;
  if (trace_) trace_->collect(), trace_->record(number >= first_ && number < first_ + options_.steps);
  if (Trace::Lane* lane = tracing()) lane->counter("bytes in use", double(backend_.memory().statistics().live_bytes));
}

void Profiler::tape(const Variable& loss) {
  if (!options_.dot.empty() && !std::exchange(drawn_, true)) write_dot(loss, options_.dot);
  if (!options_.memory || !last_looked()) return;
  for (const TapeEntry& e : tape_of(loss)) {
    if (e.saved_bytes == 0) continue;
    memory_.by_op[e.node->op] += e.saved_bytes;
    memory_.by_module[e.node->scope->empty() ? "(model)" : *e.node->scope] += e.saved_bytes;
    memory_.saved_bytes += e.saved_bytes;
  }
}

void Profiler::evaluation(bool begins) {
  if (!trace_) return;
  trace_->record(begins && !evaluated_ && !options_.trace.empty());
  evaluated_ = evaluated_ || !begins;
}

void Profiler::end() {
  if (follower_) trace_->collect(), trace_->follow(nullptr);
  if (trace_) trace_->record(false);
  if (options_.profile) std::printf("%s", profile_of(*trace_).text().c_str());
  if (options_.memory) std::printf("%s", memory_.text().c_str());
  auto nothing = [](const char* option, const std::string& file) {
    std::fprintf(stderr, "%s %s: not written, since no step that it would show was made\n", option, file.c_str());
  };
  std::vector<std::string> others;
  if (strategy_) {
    others = strategy_->gather(rank_ == 0 ? "" : trace_->events(clock_.ns));
    others.erase(others.begin());
    std::erase(others, "");  // of ranks that were lost
  }
  if (!options_.trace.empty() && rank_ == 0)
    step_ >= first_ ? trace_->write(options_.trace, others) : nothing("--trace", options_.trace);
  if (!options_.dot.empty() && !drawn_) nothing("--dot", options_.dot);
  std::fflush(stdout);
  options_ = {};
}

Profiler::Phase::Phase(Profiler& profiler, const char* name)
    : profiler_(profiler), name_(name), lane_(profiler.trace(), name), span_(name) {
  if (profiler.options_.memory && profiler.last_looked()) profiler.backend_.memory().reset_peak();
}

Profiler::Phase::~Phase() {
  if (!profiler_.options_.memory || !profiler_.last_looked() || std::strcmp(name_, "evaluation") == 0) return;
  MemoryStatistics s = profiler_.backend_.memory().statistics();
  profiler_.memory_.phases.push_back({name_, s.peak_bytes, by_use(s.at_peak)});
  profiler_.memory_.live_bytes = s.live_bytes;
  profiler_.memory_.reserved_bytes = s.reserved_bytes;
}

}  // namespace tandem
