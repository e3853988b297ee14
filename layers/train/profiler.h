// The reports of fit() about a run (callbacks/profile.cpp): a table of the modules, a picture of the tape, a table of
// times, a trace, and a table of memory.
#pragma once
#include <string>
#include <vector>

#include "core/trace/trace.h"

namespace tandem {

struct ProfilerOptions {
  bool summary = false;  // the table of modules, before the first step
  std::string dot{};     // file for a picture of the first step's tape
  bool profile = false;  // a table of operations, over the profiled steps
  std::string trace{};   // file for Chrome's trace viewer: those steps, and the first evaluation, of all ranks
  bool memory = false;   // the use of memory, at the last of those steps
  // The profiled steps: `steps` of them after `warm_up`, when kernels are chosen and memory use is constant; fewer in a
  // short run.
  std::int64_t warm_up = 10, steps = 20;
};

// ---- where the time goes --------------------------------------------------------------------------------------------
// Sums over the spans of a trace. The lanes "forward" and "backward" have operations, "step" the steps and the waits.
// For a device the lanes "device: forward", … are used, since the host's lanes only show the queueing.
struct ProfileRow {
  std::string op, module;                  // module is empty in sums over all modules
  double calls = 0;                        // per step, forward
  double forward_ms = 0, backward_ms = 0;  // per step
  double flops = 0, bytes = 0;             // per step, both directions; bytes: the minimum of memory accesses
  double ms() const { return forward_ms + backward_ms; }
};
struct Profile {
  std::int64_t steps = 0;
  double step_ms = 0, wait_ms = 0, forward_ms = 0, backward_ms = 0, optimizer_ms = 0;  // per step
  std::vector<ProfileRow> by_op, by_module;                                            // the most expensive first
  std::string text(std::size_t rows = 20) const;
};
Profile profile_of(const Trace& trace);

}  // namespace tandem
