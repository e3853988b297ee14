// The memory plan: trains within a memory budget. Each tensor that the tape saved for backward is kept, swapped or
// recomputed.
//
//   MemoryPlan plan(backend, file_mover(), {.budget = 1 << 30});
//   for (…) {
//     MemoryPlan::Step step(plan);
//     loss(model(x)).backward();
//     step.end();
//   }
//
// The first step runs on demand: when the budget is reached, the tensor that is needed last is evicted first. The step
// is recorded: every event (an operation, or a node's backward) with its time, and every saved tensor with its size,
// its last use in the forward pass and its first use in the backward pass. From the record choose_memory()
// (memory_choice.h) decides for each tensor. From then on a copy out begins right after the last use, and a copy in
// begins some events before the tensor is read. The second and third steps only recompute where that suffices, so that
// times without concurrent copies are known too. After that a new plan is made when steps take other times than
// predicted, and whenever the sequence of operations and shapes changes. If a choice that was tried earlier proves
// faster, that choice stays. A step that differs from the plan continues on demand. Steps that begin with another shape
// (an epoch's smaller last batch) have a plan of their own.
//
// A tensor that is read is always in memory: before a node's backward the engine brings back what the node saved, and
// any other reader of a storage that is not resident waits for it (core/memory.h, Keeper). Only tensors that no object
// besides the tape references are evicted. Results are bit-identical to those without a plan.
//
// On a device the host only queues work; it waits only at the end of a step whose times are read. Times are the
// device's (a Follower's marks), and only steps whose plan is not settled yet are timed. The device's queue waits for
// a copy out when its memory is requested. So a settled step does the same work each time and can be recorded
// (core/recording.h).
//
// A plan belongs to the thread that made it, and follows the passes and operations of this thread. Only this thread's
// memory requests evict tensors. Other threads (a loader) take memory for Use::data: plans leave room for its peak so
// far.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "autograd/memory_choice.h"
#include "autograd/node.h"
#include "core/mover.h"
#include "core/trace/trace.h"

namespace tandem {

struct MemoryPlanOptions {
  std::size_t budget = 0;  // limit on all bytes that the backend's allocator hands out
  SwapMode swap = SwapMode::automatic;
  std::size_t smallest = std::size_t{64} << 10;  // bytes; smaller tensors are always kept
  int batches = 1;                               // steps of the plan per update (--accumulate)
  Knapsack items = knapsack;                     // or the program's own function
};

class MemoryPlan final : public TapeWatcher, public Keeper {
 public:
  // mover may be null if no tensor is to be swapped. With SwapMode::recompute the steps without a plan use the mover;
  // without it they may exceed the budget.
  MemoryPlan(Backend& backend, std::unique_ptr<Mover> mover, const MemoryPlanOptions& options);
  ~MemoryPlan() override;
  MemoryPlan(const MemoryPlan&) = delete;

  // A forward and a backward pass. end() makes the plan. If the budget is too small, the last step before the second
  // update throws UsageError, which names a budget that is accepted. No later step ends a run: if memory is still
  // lacking, because another user has taken it, the step takes what it needs beyond the budget, prints this once, and
  // is planned again with room for it.
  class Step {
   public:
    explicit Step(MemoryPlan& plan) : plan_(plan) { plan_.begin(); }
    ~Step() { plan_.leave(); }
    Step(const Step&) = delete;
    void end() { plan_.end(); }

   private:
    MemoryPlan& plan_;
  };

  struct Measured {  // of the last step
    double seconds = 0, stall = 0;
    std::size_t peak = 0, swapped = 0, recomputed = 0;  // bytes
    int on_demand = 0;                                  // tensors evicted because a request did not fit
    bool planned = false;                               // the step followed a plan to its end
  };  // a step that was not timed has the seconds and stall of the last timed step
  const Measured& measured() const { return measured_; }
  // The choice for steps like the last one; null: no plan yet
  const MemoryChoice* choice() const { return plan_ ? &plan_->choice : nullptr; }
  bool settled() const { return plan_ && plan_->settled; }  // the last step's plan does not change any more
  // The record of the last step; without times if these were not read
  const IterationRecord& record() const { return record_; }
  MemoryMeans means() const;   // the permitted choices, and the measured rates of copies
  std::string report() const;  // one line

  // ---- called by the tape and by storages ---------------------------------------------------------------------------
  void recorded(Node& node, Operands inputs, const Tensor& y) override;
  void output_of_marked(const Tensor& y) override;
  void before(Node& node) override;
  void after(Node& node) override;
  void bring_back(Storage& storage) override;
  void gone(Storage& storage) noexcept override;

 private:
  // ---- the step in progress -----------------------------------------------------------------------------------------
  struct Source {  // of a recomputation
    Saved held;    // a parameter, or a tensor too small to evict; any other tensor while the result is discarded
    WeakTensor weak;
    int entry = -1;  // number of a tensor that may be evicted; −1: a parameter or a small tensor
  };
  struct Rerun {  // how a tensor is recomputed
    std::function<Tensor(std::span<const Tensor>)> compute;
    std::vector<Source> sources;
    double flops;
    std::uint64_t writes;  // of the result
    std::string where;
  };
  enum class At : std::uint8_t { here, leaving, outside, returning, discarded };
  struct Entry {
    Storage* storage = nullptr;  // null: it was destroyed
    At at = At::here;
    int pins = 0;              // nodes that saved it and whose backward is running
    bool needed_soon = false;  // backward reads it soon, or has read it: the plan does not evict it
    Mover::CopyId copy = 0;
    std::uint64_t writes = 0;  // when the copy began
    void* block = nullptr;     // the block that it is copied back into
    std::unique_ptr<Rerun> rerun;
  };
  // The current activity of the step. A lap ends when the activity changes; its time is attributed to the old activity.
  struct Doing {
    enum Kind : std::uint8_t { event, wait, recompute } kind = event;
    int id = -1;  // event: the tensor that it computed, at its end; recompute: the tensor
  };
  struct Lap {
    Doing did;
    int event;
    double end;  // in seconds, as now(); on a device the number of a mark
  };
  class Activity {
   public:
    Activity(MemoryPlan& plan, const Doing& now) : plan_(plan), before_(plan.doing_) { plan_.turn_to(now); }
    ~Activity() { plan_.turn_to(before_); }
    Activity(const Activity&) = delete;

   private:
    MemoryPlan& plan_;
    const Doing before_;
  };

  void begin();
  void end();
  void leave() noexcept;
  bool follows() const { return active_ && std::this_thread::get_id() == thread_; }
  int event() const { return int(record_.events.size()); }  // the current event
  double now() const;
  void turn_to(const Doing& next);
  void read_times();
  void trace_copies();
  int known(const Tensor& t) const;  // the tensor's number; −1: none
  int entry_of(const Tensor& t);     // the same; a tensor that may be evicted gets a new number
  void save(const Saved& saved);
  int remember(const Node& node, Operands inputs, const Tensor& y);
  void end_event(const Node& node, bool backward, double flops, double bytes, int computed = -1);
  void note_base();
  std::size_t others_live() const;  // bytes in use beside resident saved tensors and Use::data

  // ---- moving tensors (memory_moves.cpp) ----------------------------------------------------------------------------
  Entry& at(int id) { return entries_[std::size_t(id)]; }
  SavedRecord& saved(int id) { return record_.saved[std::size_t(id)]; }
  bool is_free(int id) { return at(id).storage && at(id).pins == 0 && at(id).storage->only_on_tape(); }
  bool may_swap() const { return options_.swap != SwapMode::off && mover_ && broken_.empty(); }
  void act(int event);  // carries out the plan's actions after this event
  void start_out(int id);
  bool finish_out(int id);
  bool start_in(int id);
  void fetch(int id);
  void finish_in(int id);
  void discard(int id);
  void compute(int id);
  std::size_t evict(std::size_t bytes, At from, bool needed_soon_too = true);
  std::size_t relieve(std::size_t bytes);  // the allocator's pressure callback
  std::size_t lacks(std::size_t bytes);    // no tensor can be evicted for these bytes: they exceed the budget

  // ---- planning -----------------------------------------------------------------------------------------------------
  struct Plan {
    MemoryChoice choice;
    std::vector<std::uint64_t> hashes;         // of the events that the plan is for
    std::vector<int> last_used;                // by tensor: it leaves after this event
    std::vector<std::pair<int, int>> fetches;  // (event, tensor) in order: the copy in begins after the event
    int times = 0, differed = 0;               // plans made; steps since then that differed from the forecast
    double alone = 0;                          // seconds of computation in a step without copies; 0: not known
    MemoryChoice best;                         // the choice of the fastest step
    double best_seconds = 0;                   // seconds of that step; 0: none yet
    bool settled = false;
    std::size_t room = 0;  // bytes for which it was planned
  };
  std::size_t room() const;  // bytes that a step may take
  void check_budget(bool first);
  void separate_copies();
  void plan_next();
  void adopt(MemoryChoice choice);

  Backend& backend_;
  const std::unique_ptr<Mover> mover_;
  const MemoryPlanOptions options_;
  const std::thread::id thread_ = std::this_thread::get_id();
  // The device's clock; null: work is done when calls return, or the device cannot measure times
  const std::unique_ptr<Follower> clock_;
  bool active_ = false, returns_ = false;  // within a step; at its end, while all evicted tensors return
  TapeWatcher* outer_ = nullptr;

  std::vector<Entry> entries_;  // by number, as record_.saved
  IterationRecord record_;
  std::vector<std::uint64_t> hashes_;          // of the events: operation and shape
  std::vector<int> staying_;                   // tensors that are in memory and may leave, or are not free yet
  std::size_t next_fetch_ = 0;                 // index in the plan's fetches
  std::vector<std::unique_ptr<Rerun>> ended_;  // of storages that are being destroyed
  std::size_t resident_ = 0, base_ = 0;        // bytes of saved tensors in memory; the event's other bytes
  std::size_t before_event_ = 0;               // others_live() when the event began
  std::uint64_t requests_ = 0;                 // memory requests of this thread, at the end of the last event
  Doing doing_;
  std::vector<Lap> laps_;
  bool timed_ = true;
  double began_ = 0;              // as now()
  std::int64_t traced_from_ = 0;  // the same moment in the trace
  bool on_plan_ = false;
  Measured now_, measured_;
  std::string broken_;  // why tensors can no longer be swapped; empty: they can

  std::map<std::uint64_t, Plan> plans_;  // by the first event: an epoch's smaller last batch has a plan of its own
  Plan* plan_ = nullptr;
  static constexpr int warm_up = 2;  // number of first plans that only recompute where that suffices
  int steps_ = 0;
  double slowdown_ = 0;      // MemoryMeans::slowdown, as measured
  std::size_t outside_ = 0;  // bytes in use at the peak between steps
  // least_: the smallest budget for the steps so far, without the first step and without Use::data. most_before_ and
  // most_in_: the maxima over all steps of the bytes in use where a step begins, and of the bytes that it takes in
  // addition. Their sum includes the workspace of every algorithm, since a backend tries all of them in the first step.
  // It does not include weights that only an algorithm of another run keeps prepared between steps.
  std::size_t least_ = 0, most_before_ = 0, most_in_ = 0;
  std::size_t lacking_ = 0, reserve_ = 0;   // bytes that this step took beyond the budget; bytes kept free from now on
  bool accepted_ = false, warned_ = false;  // check_budget() is done; lacks() has printed its warning
};

}  // namespace tandem
