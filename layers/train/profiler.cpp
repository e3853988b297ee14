#include "layers/train/profiler.h"

#include <algorithm>
#include <string_view>

#include "core/error.h"
#include "core/text.h"

namespace tandem {

// ---- where the time goes --------------------------------------------------------------------------------------------
Profile profile_of(const Trace& trace) {
  using Rows = std::map<std::pair<std::string, std::string>, ProfileRow>;
  Profile p;
  Rows by_module, by_op;
  const std::map<std::string_view, double*> phases{
      {"step", &p.step_ms}, {"forward", &p.forward_ms}, {"backward", &p.backward_ms}, {"optimizer", &p.optimizer_ms}};
  const std::string prefix = trace.find("device: step") ? "device: " : "";
  for (const auto& lane : trace.lanes()) {
    if (!lane->name().starts_with(prefix)) continue;
    const std::string which = lane->name().substr(prefix.size());
    const bool forward = which == "forward";
    for (std::size_t i = 0; i < lane->size(); i++) {
      const Trace::Event& e = (*lane)[i];
      const std::string_view kind = e.kind, name = e.name;
      const double ms = double(e.end - e.begin) / 1e6;
      if (kind == "phase" && phases.contains(name)) {
        *phases.at(name) += ms;
        p.steps += name == "step";
      } else if (kind == "wait" && which == "step") {
        p.wait_ms += ms;
      } else if (kind == "op" && (forward || which == "backward")) {
        for (ProfileRow* row : {&by_module[{e.name, e.where ? *e.where : ""}], &by_op[{e.name, ""}]}) {
          row->calls += forward;
          (forward ? row->forward_ms : row->backward_ms) += ms;
          row->flops += e.flops;
          row->bytes += e.bytes;
        }
      }
    }
  }
  const double n = double(std::max<std::int64_t>(1, p.steps));
  for (double* v : {&p.step_ms, &p.wait_ms, &p.forward_ms, &p.backward_ms, &p.optimizer_ms}) *v /= n;
  auto per_step = [&](const Rows& rows) {  // the most expensive first
    std::vector<ProfileRow> all;
    for (const auto& [key, r] : rows)
      all.push_back(
          {key.first, key.second, r.calls / n, r.forward_ms / n, r.backward_ms / n, r.flops / n, r.bytes / n});
    std::stable_sort(all.begin(), all.end(), [](const ProfileRow& a, const ProfileRow& b) { return a.ms() > b.ms(); });
    return all;
  };
  p.by_module = per_step(by_module);
  p.by_op = per_step(by_op);
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
      const double ms = r.ms();
      if (i >= rows) {
        rest += ms;
        continue;
      }
      // A reshape moves no bytes, whatever the size of its tensor.
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

}  // namespace tandem
