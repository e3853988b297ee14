// The memory plan: trains within a budget of memory by keeping, swapping or computing again what the tape saved for
// backward.
//
//   MemoryPlan plan(backend, file_mover(), {.budget = 1 << 30});
//   for (…) {
//     MemoryPlan::Step step(plan);
//     loss(model(x)).backward();
//     step.end();
//   }
//
// The first step runs on demand: when the budget is reached, what is needed last leaves first. It is recorded: every
// event (an operation, or a node's backward) with its time, every saved tensor with its size, its last use forward and
// its first one backward. From the record choose_memory() (memory_choice.h) decides for each tensor, and from then on
// copies out begin right after the last use and copies back some events before they are read. The second and third
// steps only compute again where that suffices, so that times without copies beside them are known too. Then it is
// planned anew when steps take other times than predicted, and whenever the sequence of operations and shapes changes;
// where a choice that was tried earlier proves faster, that one stays. A step that differs from the plan goes on on
// demand. Steps that begin with another shape (an epoch's smaller last batch) have a plan of their own.
//
// What is read is always there: the engine brings back what a node saved before its backward, and whoever else reads a
// storage that is away waits for it (core/memory.h, Keeper). Only tensors that nobody but the tape holds leave. Results
// are those without a plan, bit for bit.
//
// On a device the host only queues: nothing waits for it but the end of a step whose times are read. Times are the
// device's (a Follower's marks), and only steps whose plan is not settled yet are timed. Copies out are waited for, by
// the device's queue, when their memory is asked for. So a step that is settled does the same each time and can be
// recorded (core/recording.h).
//
// A plan belongs to the thread that made it, whose passes and operations it follows. Only this thread's requests make
// tensors leave. Other threads (a loader) take memory for Use::data: plans leave room for the most that this was so
// far.
#pragma once
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "autograd/memory_choice.h"
#include "autograd/node.h"
#include "autograd/recompute.h"
#include "autograd/swap.h"
#include "core/mover.h"
#include "core/trace/trace.h"

namespace tandem {

struct MemoryPlanOptions {
  std::size_t budget = 0;  // bytes of the backend's allocator, all that it hands out
  SwapMode swap = SwapMode::automatic;
  std::size_t smallest = std::size_t{64} << 10;  // smaller tensors stay
  int batches = 1;                               // steps of the plan to an update (--accumulate)
  Knapsack items = knapsack;                     // or one of your own
};

class MemoryPlan final : public TapeWatcher, public Keeper {
 public:
  // mover may be null where nothing is to be swapped; with SwapMode::recompute it serves the steps without a plan,
  // which may else pass the budget.
  MemoryPlan(Backend& backend, std::unique_ptr<Mover> mover, const MemoryPlanOptions& options);
  ~MemoryPlan() override;
  MemoryPlan(const MemoryPlan&) = delete;

  // A forward and a backward pass. end() plans. The last step before the second update throws UsageError where the
  // budget is too small, with one that is accepted in its place. No later one ends a run: where memory is still
  // lacking, because something else has taken it, the step takes what it needs beyond the budget, says so once, and is
  // planned anew with room for that.
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
    int on_demand = 0;                                  // tensors that left because a request did not fit
    bool planned = false;                               // it went by a plan, to the end
  };  // seconds and stall of a step that was not timed: those of the last one that was
  const Measured& measured() const { return measured_; }
  // For steps as the last one; null: no plan yet
  const MemoryChoice* choice() const { return plan_ ? &plan_->choice : nullptr; }
  bool settled() const { return plan_ && plan_->settled; }  // the last step went by a plan that is not changed any more
  // Of the last step; without times where these were not read
  const IterationRecord& record() const { return record_; }
  MemoryMeans means() const;   // what may be chosen, copies at the measured rates
  std::string report() const;  // one line

  // ---- what the tape and the storages call --------------------------------------------------------------------------
  void recorded(Node& node, std::span<const Variable* const> inputs, const Tensor& y) override;
  void output_of_marked(const Tensor& y) override;
  void before(Node& node) override;
  void after(Node& node) override;
  void bring_back(Storage& storage) override;
  void gone(Storage& storage) noexcept override;

 private:
  struct Source {
    Saved held;       // a parameter, or too small to leave; of another while the result is discarded
    WeakTensor weak;  // of the other
    int entry = -1;
    std::uint64_t writes = 0;
  };
  struct Made {  // how a tensor is computed again
    const Recomputation* how;
    Attributes attributes;
    std::vector<Source> sources;
    double flops;
    std::uint64_t writes;  // of the result
    std::string where;
  };
  enum class At : std::uint8_t { here, leaving, outside, returning, nowhere };
  struct Entry {
    Storage* storage = nullptr;  // null: it has ended
    At at = At::here;
    int pins = 0;                       // nodes that run backward and saved it
    bool claimed = false;               // backward has read it
    bool wanted = false;                // it is read soon: it does not leave by itself
    int depth = 0;                      // discarded: how many have to be computed one from the other
    std::vector<std::uint64_t> savers;  // sequence numbers of nodes whose backward has not run, ascending
    Mover::CopyId copy = 0;
    std::uint64_t writes = 0;  // when the copy began
    void* block = nullptr;     // to which it returns
    std::unique_ptr<Made> made;
  };

  void begin();
  void end();
  void leave() noexcept;
  std::size_t relieve(std::size_t bytes);  // the allocator's pressure callback
  std::size_t lacks(std::size_t bytes);    // which nothing can leave for: they are taken beyond the budget
  std::size_t room() const;                // what a step may take

  // Following the step.
  bool follows() const { return active_ && std::this_thread::get_id() == thread_; }
  int event() const { return int(record_.events.size()); }  // the one under way
  double now() const;
  // Time is taken as a row of moments, which read_times() turns into seconds when the step is over.
  enum class Tick : std::uint8_t { ended, acted, waits, waited, computes, computed };
  struct Moment {
    Tick tick;
    int id;       // ended: what the event made; computed: what was computed again; −1: nothing
    double time;  // as now(); the number of a device's mark until the step is over
  };
  void take_time(Tick tick, int id = -1);
  void read_times();
  class Timing {  // the computation waits, or computes again
   public:
    Timing(MemoryPlan& plan, Tick begin, Tick end, int id = -1) : plan_(plan), end_(end), id_(id) {
      plan_.take_time(begin);
    }
    ~Timing() { plan_.take_time(end_, id_); }
    Timing(const Timing&) = delete;

   private:
    MemoryPlan& plan_;
    Tick end_;
    int id_;
  };
  int known(const Tensor& t) const;  // its number; −1: none
  int entry_of(const Tensor& t);     // the same, with a new number where it may leave
  void save(const Saved& saved, const Node& node);
  int remember(const Node& node, std::span<const Variable* const> inputs, const Tensor& y);
  std::size_t borrowed(const Node& node, std::span<const Variable* const> inputs, const Tensor& y);
  bool add_source(Made& made, std::vector<int>& entries, const Tensor& t) const;
  void end_event(const Node& node, bool backward, double flops, double bytes, int made = -1);
  void note_base();

  // Moving.
  Entry& at(int id) { return entries_[std::size_t(id)]; }
  SavedRecord& saved(int id) { return record_.saved[std::size_t(id)]; }
  static bool is_free(const Entry& e) { return e.storage && e.pins == 0 && e.storage->only_on_tape(); }
  bool may_swap() const { return options_.swap != SwapMode::off && mover_ && broken_.empty(); }
  bool may_discard(const Entry& e) const;
  void act(int event);  // what the plan says after this event
  void start_out(int id);
  bool finish_out(int id);
  bool start_in(int id);
  void finish_in(int id);
  void discard(int id);
  void compute(int id);
  std::size_t finish_leaving(std::size_t bytes, bool wanted_too);
  int victim();
  std::size_t evict(int id);

  // Planning.
  void finish_record();
  void trace_copies();
  void part_from_copies();
  void plan_next();
  void adopt(MemoryChoice choice);

  Backend& backend_;
  const std::unique_ptr<Mover> mover_;
  const MemoryPlanOptions options_;
  const std::thread::id thread_;
  // The device's; null: work is done when calls return, or the device cannot tell
  const std::unique_ptr<Follower> clock_;
  bool active_ = false, returns_ = false;  // within a step; at its end, when all that is away returns
  TapeWatcher* outer_ = nullptr;

  // Of the step under way.
  std::vector<Entry> entries_;  // by number, as record_.saved
  IterationRecord record_;
  std::vector<std::uint64_t> hashes_;             // of the events: operation and shape
  std::vector<int> leaving_, discarding_, held_;  // on their way out; to be discarded when free; not free yet
  std::deque<int> returning_;                     // to be fetched as soon as there is room, in order
  std::vector<std::unique_ptr<Made>> ended_;      // of storages that are ending
  std::size_t resident_ = 0, base_ = 0;           // bytes of saved tensors in memory; the event's, beside these
  std::uint64_t requests_ = 0;                    // of this thread for memory, at the end of the last event
  std::vector<Moment> moments_;
  bool timed_ = true;
  double began_ = 0;              // as now()
  std::int64_t traced_from_ = 0;  // the same moment in the trace
  bool on_plan_ = false;
  Measured now_, measured_;
  std::string broken_;  // why nothing can be swapped any more

  struct Plan {
    MemoryChoice choice;
    std::vector<std::uint64_t> hashes;                       // of the events that it is for
    std::vector<std::vector<int>> leave_after, fetch_after;  // tensors by event
    int made = 0, waited = 0;  // times that it was planned anew; steps since, that went otherwise
    double alone = 0;          // seconds of computation in a step without copies; 0: not known
    MemoryChoice best;         // the choice of the fastest step
    double best_seconds = 0;   // which took so long; 0: none yet
    bool settled = false;
    std::size_t room = 0;  // within which it was planned
  };
  std::map<std::uint64_t, Plan> plans_;  // by the first event: an epoch's smaller last batch has a plan of its own
  Plan* plan_ = nullptr;
  static constexpr int warm_up = 2;  // steps
  int steps_ = 0;
  double slowdown_ = 0;      // MemoryMeans::slowdown, as measured
  std::size_t outside_ = 0;  // bytes in use at the peak between steps
  // The smallest budget for the steps so far, Use::data left out. enough_: with the first one, in which a backend tries
  // all of its algorithms, so that it is enough whichever another run chooses.
  std::size_t least_ = 0, enough_ = 0;
  std::size_t lacking_ = 0, reserve_ = 0;   // bytes that this step took beyond the budget; kept free for the next time
  bool accepted_ = false, warned_ = false;  // the first steps are over: the budget holds; it did not
};

}  // namespace tandem
