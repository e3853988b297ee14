// Runs exchanges in a separate thread while the strategy's thread computes. An exchange begins when its event has
// occurred. Exchanges begin in the order in which they were added, which is the same on all ranks.
//
// From add() until all exchanges over a communicator have ended, only this thread uses that communicator.
#pragma once
#include <condition_variable>
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
    Event* after = nullptr;  // the device's event before which it must not begin; null: none
    std::function<Work(Communicator& over)> begin;
    std::function<void()> end = {};
    const char* name = "all-reduce";  // in the trace
  };

  // ranks: this communicator is failed if a rank's event does not occur within `deadline` seconds.
  Reducer(Communicator& ranks, double deadline);
  ~Reducer();
  using Pending = std::int64_t;  // number of an added exchange
  Pending add(Exchange exchange);
  void wait(Pending exchange);  // until this exchange has ended; throws an error of any exchange
  void waits();                 // backward is over: the step waits until finish() returns; any thread
  void finish();                // until all exchanges have ended
  void watch(Trace& trace);     // call before the first exchange: records each as a span
  struct Seconds {
    double hidden = 0, exposed = 0;  // an exchange was in progress and the step did not wait; the step waited
  };
  Seconds seconds() const;

 private:
  struct UnderWay {
    Exchange exchange;
    Pending number;
    Work work = {};
    std::int64_t lane = 0, since = -1;  // in the trace
  };
  void run();
  void begin_due(std::list<UnderWay>& waiting, std::list<UnderWay>& under_way);
  std::size_t end_finished(std::list<UnderWay>& under_way);
  void wait_until(const std::function<bool()>& over);
  bool may_begin(const Exchange& exchange);
  void wait_ends(), count_hidden();  // call with the lock held

  Communicator& ranks_;
  double deadline_;
  Trace* trace_ = nullptr;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::list<UnderWay> given_;
  Pending count_ = 0;       // exchanges that were added: the same on all ranks
  std::set<Pending> open_;  // exchanges that have not ended
  Seconds seconds_;
  // start time of an overlap (an exchange in progress, no waiting step); the epoch: no overlap now
  Clock::time_point ahead_;
  Clock::time_point waits_;  // when the step began to wait; the epoch: it does not wait
  bool end_ = false;
  std::exception_ptr failed_;
  Clock::time_point asked_;  // when the first waiting exchange's event was first polled
  std::thread thread_;
};

}  // namespace tandem
