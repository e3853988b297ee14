// Trace: records what ran when. A trace has lanes (forward, backward, a loader's thread, a device's stream, a phase of
// an exchange). A lane holds spans; two spans of a lane are disjoint or nested. A thread records on its current lane. A
// thread without a lane, which is the default, records nothing; a span then costs one branch.
//
//   Trace trace;
//   OnLane on(&trace, "forward");                  // this thread's lane until the end of the scope
//   { Span s("forward", "phase"); … }              // one span
//   trace.write("run.json");                       // for chrome://tracing or ui.perfetto.dev
//
// Work that is queued on a device runs later than the span in which it was queued. A Follower puts marks into the
// device's queue where spans begin and end. collect() then adds the same spans, with the device's times, to lanes with
// names like "device: forward".
//
// One thread at a time writes to a lane; different lanes may be written concurrently. Read the trace (events, json,
// write) only while no thread writes. Each lane has a maximum number of events; later ones are dropped and counted.
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

// The interface of a device or a profiler that is notified of spans, by the one thread that queues the work.
class Follower {
 public:
  virtual ~Follower() = default;
  virtual void enter(const char* name) = 0;   // a span begins
  virtual void leave() = 0;                   // the span that began last ends
  virtual void passed(const char* name) = 0;  // an operation was queued, without an enter() before it
  virtual std::int64_t mark() = 0;            // puts a mark into the queue and returns its number, from 0
  // The times at which the device passed the marks, in ns of the clock `now`. Waits for the device. The next mark has
  // the number 0.
  virtual std::vector<std::int64_t> times(const std::function<std::int64_t()>& now) = 0;
};

class Trace {
 public:
  struct Event {
    const char* name = "";               // "conv2d", "step"; must live as long as the program
    const char* kind = "";               // "op", "module", "phase", "wait", or "counter"
    const std::string* where = nullptr;  // path of the module; must live until the trace is read; null: none
    std::int64_t begin = 0, end = 0;     // ns since the trace began
    std::int64_t number = -1;            // number of the step or the batch; −1: none
    double flops = 0, bytes = 0;         // the work; 0: unknown. A counter has its value in `bytes`
    std::int64_t mark = -1;              // the device's mark at its begin; −1: the mark before its end, or none
  };

  class Lane {
   public:
    Lane(Trace& trace, std::string name, int index) : trace_(trace), name_(std::move(name)), index_(index) {}
    Trace& trace() const { return trace_; }
    const std::string& name() const { return name_; }
    int index() const { return index_; }
    std::int64_t now() const { return trace_.now(); }
    // Sets the time at which the last span began or ended; until_now() uses it as the begin of its span.
    void mark(std::int64_t t) { mark_ = t; }
    void add(const Event& e);   // begin and end are set
    void keep(const Event& e);  // adds a span of work elsewhere; does not notify the follower
    Event begin(Event e);       // starts a span now, also for the follower; add_now() ends it
    void add_now(Event e);
    void until_now(Event e);                       // a span from the time of mark() to now
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

  // process, rank: identify this trace where several are shown together. limit: the maximum number of events per lane.
  explicit Trace(std::string process = "tandem", int rank = 0, std::size_t limit = std::size_t{1} << 18);
  Trace(const Trace&) = delete;

  void name(std::string process) { process_ = std::move(process); }
  Lane& lane(const std::string& name);  // created at the first call; shown in the order of creation
  // Off: spans that begin from now on are not recorded, on any lane.
  void record(bool on) { on_.store(on, std::memory_order_relaxed); }
  bool recording() const { return on_.load(std::memory_order_relaxed); }
  std::int64_t now() const { return (Clock::now() - begin_).count(); }

  // From now on the follower is notified of this thread's spans; null: no follower. Call collect() before a change.
  void follow(Follower* follower);
  void collect();

  const std::vector<std::unique_ptr<Lane>>& lanes() const { return lanes_; }
  const Lane* find(const std::string& name) const;  // null: there is none
  // Chrome's trace event format; times in µs. others: events() of other ranks, which are added.
  std::string json(const std::vector<std::string>& others = {}) const;
  std::string events(std::int64_t shift_ns = 0) const;  // only the events; adds shift_ns to their times
  void write(const std::string& path, const std::vector<std::string>& others = {}) const;  // throws UsageError

 private:
  using Clock = std::chrono::steady_clock;
  static_assert(std::is_same_v<Clock::duration, std::chrono::nanoseconds>);
  std::string process_;
  int rank_;
  std::size_t limit_;
  Clock::time_point begin_ = Clock::now();
  std::int64_t unix_us_;  // when the trace began; aligns traces of several hosts
  std::atomic<bool> on_{true};
  std::mutex mutex_;
  std::vector<std::unique_ptr<Lane>> lanes_;

  Follower* follower() const {
    return follower_ && std::this_thread::get_id() == followed_thread_ ? follower_ : nullptr;
  }
  Follower* follower_ = nullptr;
  std::thread::id followed_thread_;
  std::int64_t last_mark_ = -1;
  std::vector<std::pair<Lane*, Event>> followed_;  // have ended on the host; `mark` and `end` are numbers of marks
};

Trace::Lane*& thread_lane();  // the lane of this thread; null: none
// The lane on which this thread records now; null: none.
inline Trace::Lane* tracing() {
  Trace::Lane* lane = thread_lane();
  return lane && lane->trace().recording() ? lane : nullptr;
}

// Sets this thread's lane until the end of a scope. A null trace changes nothing.
class OnLane {
 public:
  OnLane(Trace* trace, const std::string& name) : before_(thread_lane()) {
    if (!trace) return;
    thread_lane() = &trace->lane(name);
    thread_lane()->mark(trace->now());
  }
  ~OnLane() {
    thread_lane() = before_;
    if (before_) before_->mark(before_->now());  // its next until_now() does not include the time on the other lane
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
