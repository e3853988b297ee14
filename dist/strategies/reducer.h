// Exchanges in a thread of its own, while the strategy's thread computes. Each begins when what it waits for is there, and all
// in the order in which they were given, which is the same on all ranks.
//
// While it is idle, communicators are their caller's; from add() to finish() they are this thread's.
#pragma once
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "core/queue.h"
#include "core/trace/trace.h"
#include "dist/collectives/communicator.h"

namespace tandem {

class Reducer {
 public:
  struct Exchange {
    Communicator& over;
    Event* after;  // what the device has to come to before it may begin; null: nothing
    std::function<Work(Communicator& over)> begin;
    std::function<void()> end = {};
    const char* name = "all-reduce";  // on the trace
  };

  // ranks: where a rank fails that does not come to its event within `deadline` seconds.
  Reducer(Communicator& ranks, double deadline);
  ~Reducer();
  void add(Exchange exchange);
  void watch(Trace& trace);      // before the first exchange: each is a span of it from now on
  void call(Exchange exchange);  // adds it, and waits for it alone; it has no `end`
  void waits();                  // backward is over, and the step waits from now until finish() ends; any thread
  void finish();                 // until all is over; throws what went wrong
  double hidden() const;         // seconds in which something was under way and the step did not wait
  double exposed() const;        // seconds in which it waited

 private:
  using Clock = std::chrono::steady_clock;
  struct UnderWay {
    Exchange exchange;
    Work work;
    std::int64_t number = 0, lane = 0, since = -1;  // on the trace
  };
  void run();
  bool may_begin(const Exchange& exchange);
  void wait_ends(), count_hidden();  // under the lock
  static double since(Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); }

  Communicator& ranks_;
  double deadline_;
  Trace* trace_ = nullptr;
  std::int64_t count_ = 0;  // exchanges begun: the same on all ranks
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Exchange> given_;
  std::int64_t open_ = 0;  // given and not yet over
  double hidden_ = 0, exposed_ = 0;
  Clock::time_point ahead_;  // since when something is under way and the step does not wait; the epoch: nothing is
  Clock::time_point waits_;  // since when the step waits; the epoch: it does not
  bool end_ = false;
  std::exception_ptr failed_;
  Clock::time_point asked_;  // when the first of those that wait was first asked for its event
  std::thread thread_;
};

}  // namespace tandem
