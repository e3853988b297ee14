// Trace: what ran when. A trace has lanes (forward, backward, a loader's thread; later a device's stream, a phase of an
// exchange), and a lane holds spans that lie one behind or inside the other. Each thread writes to the lane it stands
// on; standing on none, which is how threads begin, it records nothing, and that costs one branch.
//
//   Trace trace;
//   OnLane on(&trace, "forward");                  // this thread's spans go here until the end of the scope
//   { Span s("forward", "phase"); … }              // one span
//   trace.write("run.json");                       // for chrome://tracing or ui.perfetto.dev
//
// Work that is queued on a device runs later than the span in which it was queued. A Follower marks the device's queue
// where spans begin and end; collect() then lays the same spans, as the device saw them, on lanes called "device:
// forward", ….
//
// A lane is written by one thread at a time; different lanes at once. Reading (events, json, write) is for when nobody
// writes. The number of events is bounded: what comes beyond is dropped and counted.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace tandem {

// A device, or a profiler, that is told of spans as they begin and end, by the one thread that queues the work.
class Follower {
 public:
  virtual ~Follower() = default;
  virtual void enter(const char* name) = 0;   // a span begins,
  virtual void leave() = 0;                   // and the last that began ends
  virtual void passed(const char* name) = 0;  // an operation was queued, whose beginning nobody told
  virtual std::int64_t mark() = 0;            // puts a mark into the queue and returns its number, from 0
  // When the device passed each mark, in ns of the clock `now`; waits for the device. Marks are counted from 0 again.
  virtual std::vector<std::int64_t> times(const std::function<std::int64_t()>& now) = 0;
};

class Trace {
 public:
  struct Event {
    const char* name = "";               // "conv2d", "step"; lives as long as the program
    const char* kind = "";               // "op", "module", "phase", "wait", or "counter"
    const std::string* where = nullptr;  // path of the module, alive until the trace was read; null: none
    std::int64_t begin = 0, end = 0;     // ns since the trace began
    std::int64_t number = -1;            // of the step or the batch; −1: none
    double flops = 0, bytes = 0;         // of the work; 0: unknown. A counter has its value in `bytes`
    std::int64_t mark = -1;  // in the device's queue, where it began; −1: none, or where the last one ended
  };

  class Lane {
   public:
    Lane(Trace& trace, std::string name, int index) : trace_(trace), name_(std::move(name)), index_(index) {}
    Trace& trace() const { return trace_; }
    const std::string& name() const { return name_; }
    int index() const { return index_; }
    std::int64_t now() const { return trace_.now(); }
    // The last span began or ended at t: what is known only when it is over is taken to have begun there.
    void mark(std::int64_t t) { mark_ = t; }
    void add(const Event& e);   // begin and end are set
    void keep(const Event& e);  // of work elsewhere, with its begin and end: the follower is not told
    Event begin(Event e);       // begins now, for the follower, too; add_now() ends it
    void add_now(Event e);
    void until_now(Event e);                       // a span from there to now
    void counter(const char* name, double value);  // a number over time: bytes in use, staleness
    const std::deque<Event>& events() const { return events_; }
    std::size_t dropped() const { return dropped_; }

   private:
    friend class Trace;
    void follow(Event e);
    Trace& trace_;
    std::string name_;
    int index_;
    std::deque<Event> events_;
    std::size_t dropped_ = 0;
    std::int64_t mark_ = 0;
  };

  // process and rank name the rows of several traces shown together; limit: events kept per lane.
  explicit Trace(std::string process = "tandem", int rank = 0, std::size_t limit = std::size_t{1} << 18);
  Trace(const Trace&) = delete;

  void name(std::string process) { process_ = std::move(process); }
  Lane& lane(const std::string& name);  // made at the first call; shown in that order
  // Off: spans that begin from now on are not recorded, on any lane.
  void record(bool on) { on_.store(on, std::memory_order_relaxed); }
  bool recording() const { return on_.load(std::memory_order_relaxed); }
  std::int64_t now() const { return (Clock::now() - begin_).count(); }

  // From now on the spans of this thread are the follower's, too; null: no longer. collect() first.
  void follow(Follower* follower);
  void collect();

  const std::vector<std::unique_ptr<Lane>>& lanes() const { return lanes_; }
  const Lane* find(const std::string& name) const;  // null when there is none
  // Chrome's trace event format; times in µs. others: events() of other ranks, shown beside these.
  std::string json(const std::vector<std::string>& others = {}) const;
  std::string events(std::int64_t shift_ns = 0) const;  // its rows alone, their times moved to another rank's clock
  void write(const std::string& path, const std::vector<std::string>& others = {}) const;  // throws UsageError

 private:
  using Clock = std::chrono::steady_clock;
  static_assert(std::is_same_v<Clock::duration, std::chrono::nanoseconds>);
  std::string process_;
  int rank_;
  std::size_t limit_;
  Clock::time_point begin_ = Clock::now();
  std::int64_t unix_us_;  // when the trace began, to lay traces of several hosts beside each other
  std::atomic<bool> on_{true};
  std::mutex mutex_;
  std::vector<std::unique_ptr<Lane>> lanes_;

  Follower* follower() const {
    return follower_ && std::this_thread::get_id() == followed_thread_ ? follower_ : nullptr;
  }
  Follower* follower_ = nullptr;
  std::thread::id followed_thread_;
  std::int64_t last_mark_ = -1;
  std::vector<std::pair<Lane*, Event>> followed_;  // ended on the host; `mark` and `end` number marks of the device
};

Trace::Lane*& thread_lane();  // where this thread stands; null: nowhere
// The lane to record on now; null: none.
inline Trace::Lane* tracing() {
  Trace::Lane* lane = thread_lane();
  return lane && lane->trace().recording() ? lane : nullptr;
}

// For its scope this thread stands on a lane; a null trace changes nothing.
class OnLane {
 public:
  OnLane(Trace* trace, const std::string& name) : before_(thread_lane()) {
    if (!trace) return;
    thread_lane() = &trace->lane(name);
    thread_lane()->mark(trace->now());
  }
  ~OnLane() {
    thread_lane() = before_;
    if (before_) before_->mark(before_->now());  // the time on the other lane is not this one's
  }
  OnLane(const OnLane&) = delete;

 private:
  Trace::Lane* before_;
};

// A span on this thread's lane from here to the end of the scope.
class Span {
 public:
  explicit Span(const char* name, const char* kind = "phase", const std::string* where = nullptr,
                std::int64_t number = -1)
      : lane_(tracing()) {
    if (!lane_) return;
    event_ = lane_->begin({.name = name, .kind = kind, .where = where, .number = number});
    lane_->mark(event_.begin);
  }
  ~Span() {
    if (lane_) lane_->add_now(event_);
  }
  Span(const Span&) = delete;

 private:
  Trace::Lane* lane_;
  Trace::Event event_;
};

}  // namespace tandem
