#include "layers/train/profiler.h"

#include <algorithm>
#include <map>
#include <string_view>

#include "core/error.h"
#include "core/text.h"
#include "layers/export/summary.h"

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
    for (const Trace::Event& e : lane->events()) {
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
  auto share_of = [](double ms, double all) { return printed("%.1f %%", 100 * ms / std::max(1e-12, all)); };
  std::vector<std::vector<std::string>> phases;
  for (const auto& [name, ms] : {std::pair{"waiting for a batch", wait_ms},
                                 {"forward", forward_ms},
                                 {"backward", backward_ms},
                                 {"optimizer", optimizer_ms},
                                 {"rest of the step", step_ms - operations - optimizer_ms}})
    phases.push_back({std::string("  ") + name, printed("%.3f", ms), share_of(ms, whole)});
  out += aligned(phases, 1);
  auto table = [&](const std::vector<ProfileRow>& list, const char* module) {
    std::vector<std::vector<std::string>> lines{{"operation", module, "calls", "forward", "backward", "share", "rate"}};
    double rest = 0;
    for (const ProfileRow& r : list) {
      const double ms = r.ms();
      if (lines.size() > rows) {
        rest += ms;
        continue;
      }
      // A reshape moves no bytes, whatever the size of its tensor.
      std::string rate = ms <= 0                            ? ""
                         : r.flops > 0                      ? printed("%.0f GFLOP/s", r.flops / ms / 1e6)
                         : r.bytes > 0 && r.op != "reshape" ? printed("%.1f GB/s", r.bytes / ms / 1e6)
                                                            : "";
      lines.push_back({r.op, r.module, printed("%.4g", r.calls), printed("%.3f", r.forward_ms),
                       printed("%.3f", r.backward_ms), share_of(ms, operations), rate});
    }
    out += "\n" + aligned(lines, 2);
    if (list.size() > rows)
      out += printed("and %zu more: %.3f ms, %s\n", list.size() - rows, rest, share_of(rest, operations).c_str());
  };
  table(by_op, "");
  table(by_module, "module");
  return out;
}

}  // namespace tandem
