// Exchanges in a thread of its own, while the strategy's thread computes. Each begins when what it waits for is there,
// and all in the order in which they were given, which is the same on all ranks.
//
// A communicator is this thread's from add() until everything that was added over it has ended.
#pragma once
#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "core/clock.h"
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
  using Pending = std::int64_t;  // an exchange that was added
  Pending add(Exchange exchange);
  void wait(Pending exchange);  // until this one has ended; throws what went wrong in any
  void finish();                // until all have ended
  void waits();              // backward is over: the step waits from now until wait() or finish() returns; any thread
  void watch(Trace& trace);  // before the first exchange: each is a span of it from now on
  double hidden() const;     // seconds in which something was under way and the step did not wait
  double exposed() const;    // seconds in which it waited

 private:
  struct UnderWay {
    Exchange exchange;
    Pending number;
    Work work = {};
    std::int64_t lane = 0, since = -1;  // on the trace
  };
  void run();
  void begin_due(std::deque<UnderWay>& waiting, std::list<UnderWay>& under_way);
  std::size_t end_finished(std::list<UnderWay>& under_way);
  void wait_until(const std::function<bool()>& over);
  bool may_begin(const Exchange& exchange);
  void wait_ends(), count_hidden();  // under the lock

  Communicator& ranks_;
  double deadline_;
  Trace* trace_ = nullptr;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<UnderWay> given_;
  Pending count_ = 0;       // exchanges added: the same on all ranks
  std::set<Pending> open_;  // those that have not ended
  double hidden_ = 0, exposed_ = 0;
  Clock::time_point ahead_;  // since when something is under way and the step does not wait; the epoch: nothing is
  Clock::time_point waits_;  // since when the step waits; the epoch: it does not
  bool end_ = false;
  std::exception_ptr failed_;
  Clock::time_point asked_;  // when the first of those that wait was first asked for its event
  std::thread thread_;
};

}  // namespace tandem
