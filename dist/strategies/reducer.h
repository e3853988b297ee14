// Runs exchanges in a separate thread while the strategy's thread computes. An exchange begins when its event has
// occurred. Exchanges begin in the order in which they were added, which is the same on all ranks.
//
// From add() until all exchanges over a communicator have ended, only the Reducer's thread uses that communicator.
#pragma once
#include <algorithm>
#include <condition_variable>
#include <functional>
#include <list>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
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
  Reducer(Communicator& ranks, double deadline) : ranks_(ranks), deadline_(deadline), thread_([this] { run(); }) {}

  ~Reducer() {
    {
      std::lock_guard lock(mutex_);
      end_ = true;
    }
    changed_.notify_all();
    ranks_.wake();
    thread_.join();
  }

  using Pending = std::int64_t;  // number of an added exchange
  Pending add(Exchange exchange) {
    Pending number;
    {
      std::lock_guard lock(mutex_);
      number = count_++;
      open_.insert(number);
      given_.push_back({std::move(exchange), number});
    }
    changed_.notify_all();
    ranks_.wake();
    return number;
  }

  // Waits until this exchange has ended. Throws an error of any exchange.
  void wait(Pending exchange) {
    waits();
    wait_until([&] { return !open_.count(exchange); });
  }

  // Backward is over: the step waits until finish() returns. Any thread.
  void waits() {
    std::lock_guard lock(mutex_);
    count_hidden();
    waits_ = Clock::now();
  }

  // Waits until all exchanges have ended.
  void finish() {
    wait_until([&] { return open_.empty(); });
  }

  // Call before the first exchange: records each as a span.
  void watch(Trace& trace) {
    std::lock_guard lock(mutex_);
    trace_ = &trace;
  }

  struct Seconds {
    double hidden = 0, exposed = 0;  // an exchange was in progress and the step did not wait; the step waited
  };
  Seconds seconds() const {
    std::lock_guard lock(mutex_);
    return seconds_;
  }

 private:
  struct UnderWay {
    Exchange exchange;
    Pending number;
    Work work = {};
    std::int64_t lane = 0, since = -1;  // in the trace
  };
  void run() {
    std::list<UnderWay> waiting, under_way;
    try {
      for (;;) {
        {
          std::unique_lock lock(mutex_);
          if (waiting.empty() && under_way.empty()) changed_.wait(lock, [&] { return end_ || !given_.empty(); });
          if (end_) return;
          waiting.splice(waiting.end(), given_);
        }
        begin_due(waiting, under_way);
        if (end_finished(under_way) > 0) continue;
        if (!waiting.empty())
          std::this_thread::sleep_for(std::chrono::microseconds(20));
        else if (!under_way.empty())
          under_way.front().exchange.over.rest();
      }
    } catch (...) {
      std::lock_guard lock(mutex_);
      failed_ = std::current_exception();
      changed_.notify_all();
    }
  }

  void begin_due(std::list<UnderWay>& waiting, std::list<UnderWay>& under_way) {
    while (!waiting.empty() && may_begin(waiting.front().exchange)) {
      if (under_way.empty()) {
        std::lock_guard lock(mutex_);
        if (waits_ == Clock::time_point()) ahead_ = Clock::now();
      }
      std::int64_t lane = 1;  // the first free one: the spans of a lane must not overlap
      while (std::any_of(under_way.begin(), under_way.end(), [&](const UnderWay& u) { return u.lane == lane; })) lane++;
      under_way.splice(under_way.end(), waiting, waiting.begin());
      UnderWay& u = under_way.back();
      u.lane = lane;
      if (trace_ && trace_->recording()) u.since = trace_->now();
      u.work = u.exchange.begin(u.exchange.over);
    }
  }

  // Returns how many exchanges have ended.
  std::size_t end_finished(std::list<UnderWay>& under_way) {
    std::vector<Pending> ended;
    under_way.remove_if([&](UnderWay& u) {
      if (!u.work.done()) return false;
      if (u.exchange.end) u.exchange.end();
      if (u.since >= 0)
        trace_->lane("exchange " + std::to_string(u.lane))
            .add({.name = u.exchange.name,
                  .kind = "exchange",
                  .begin = u.since,
                  .end = trace_->now(),
                  .number = u.number});
      ended.push_back(u.number);
      return true;
    });
    if (ended.empty()) return 0;
    std::lock_guard lock(mutex_);
    for (Pending number : ended) open_.erase(number);
    if (under_way.empty()) count_hidden();
    changed_.notify_all();
    return ended.size();
  }

  void wait_until(const std::function<bool()>& over) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return over() || failed_; });
    if (failed_) std::rethrow_exception(failed_);
    wait_ends();
  }

  // A device sends no notification, so its event is polled. Other ranks may fail meanwhile.
  bool may_begin(const Exchange& exchange) {
    if (!exchange.after || exchange.after->done()) {
      asked_ = {};
      return true;
    }
    if (asked_ == Clock::time_point()) asked_ = Clock::now();
    if (seconds_since(asked_) > deadline_) {
      const int me = ranks_.rank();
      const std::string text = ranks_.where(me) + ": its device has not come to the end of backward for " +
                               std::to_string(int(deadline_)) + " s";
      ranks_.group()->fail(me, text);
      throw CommunicationError(me, text);
    }
    ranks_.group()->check();
    return false;
  }

  // Call this and the next one with the lock held.
  void count_hidden() {
    if (ahead_ != Clock::time_point()) seconds_.hidden += seconds_since(std::exchange(ahead_, {}));
  }
  void wait_ends() {
    if (waits_ != Clock::time_point()) seconds_.exposed += seconds_since(std::exchange(waits_, {}));
    if (!open_.empty()) ahead_ = Clock::now();
  }

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
