// The profiler: a table of the modules, a picture of the tape, a table of times, and a table of memory, made during
// training. fit() has a Profiler; a user's own loop can use one with the same calls.
#pragma once
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/trace/trace.h"
#include "layers/export/summary.h"
#include "layers/train/strategy.h"

namespace tandem {

struct ProfilerOptions {
  bool summary = false;  // the table of modules, before the first step
  std::string dot;       // file for a picture of the first step's tape
  bool profile = false;  // a table of operations, over the profiled steps
  std::string trace;     // file for Chrome's trace viewer: those steps, and the first evaluation, of all ranks
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
};
struct Profile {
  std::int64_t steps = 0;
  double step_ms = 0, wait_ms = 0, forward_ms = 0, backward_ms = 0, optimizer_ms = 0;  // per step
  std::vector<ProfileRow> by_op, by_module;                                            // the most expensive first
  std::string text(std::size_t rows = 20) const;
};
Profile profile_of(const Trace& trace);

// ---- the use of memory ----------------------------------------------------------------------------------------------
struct MemoryReport {
  struct Phase {
    std::string name;
    std::size_t peak_bytes = 0;
    std::string holders;  // the bytes by use at that peak
  };
  std::vector<Phase> phases;                            // of one step
  std::map<std::string, std::size_t> by_op, by_module;  // kept for backward
  std::size_t saved_bytes = 0, live_bytes = 0, reserved_bytes = 0;
  std::string text(std::size_t rows = 10) const;
};

// ---- the profiler ---------------------------------------------------------------------------------------------------
class Profiler {
 public:
  // For the steps [begin, end). Only rank 0 prints. Throws UsageError when a file cannot be written, or contains
  // something else, so that this error occurs before the training.
  Profiler(ProfilerOptions options, Backend& backend, int rank, std::int64_t begin, std::int64_t end);

  // Prepares that rank 0 makes one file from the traces of several ranks. Called before the first step, on all ranks.
  void share(Strategy& strategy);
  Trace* trace() { return trace_ ? &*trace_ : nullptr; }                         // null: no trace was requested
  void before(Module& model, const Tensor& images, const TrainingState& state);  // prints the summary
  void step(std::int64_t number);                                                // a step begins
  void tape(const Variable& loss);                                               // between forward and backward
  // Whether this step must run on the host, since a replayed step cannot be observed.
  bool looks() const {
    return (trace_ && trace_->recording()) || (!options_.dot.empty() && !drawn_) || (options_.memory && last_looked());
  }
  void evaluation(bool begins);  // traced, the first time
  void end();                    // prints and writes the remaining results; a second call does nothing

  // While an object of this class exists, a part of the step runs: "forward", "backward", "optimizer", "evaluation".
  class Phase {
   public:
    Phase(Profiler& profiler, const char* name);
    ~Phase();
    Phase(const Phase&) = delete;

   private:
    Profiler& profiler_;
    const char* name_;
    OnLane lane_;
    Span span_;
  };

 private:
  bool last_looked() const { return step_ + 1 == first_ + options_.steps; }
  ProfilerOptions options_;
  Backend& backend_;
  std::int64_t first_, step_ = -1;
  bool drawn_ = false, evaluated_ = false;
  std::unique_ptr<Follower> follower_;  // of the device, if it is one
  std::optional<Trace> trace_;
  int rank_;
  Strategy* strategy_ = nullptr;
  Strategy::ClockOffset clock_;
  MemoryReport memory_;
};

}  // namespace tandem
