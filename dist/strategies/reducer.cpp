#include "dist/strategies/reducer.h"

#include <algorithm>
#include <string>
#include <utility>

namespace tandem {

Reducer::Reducer(Communicator& ranks, double deadline)
    : ranks_(ranks), deadline_(deadline), thread_([this] { run(); }) {}

Reducer::~Reducer() {
  {
    std::lock_guard lock(mutex_);
    end_ = true;
  }
  changed_.notify_all();
  ranks_.wake();
  thread_.join();
}

Reducer::Pending Reducer::add(Exchange exchange) {
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

void Reducer::wait(Pending exchange) {
  waits();
  wait_until([&] { return !open_.count(exchange); });
}

void Reducer::finish() {
  wait_until([&] { return open_.empty(); });
}

void Reducer::wait_until(const std::function<bool()>& over) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return over() || failed_; });
  if (failed_) std::rethrow_exception(failed_);
  wait_ends();
}

void Reducer::watch(Trace& trace) {
  std::lock_guard lock(mutex_);
  trace_ = &trace;
}

void Reducer::waits() {
  std::lock_guard lock(mutex_);
  count_hidden();
  waits_ = Clock::now();
}

void Reducer::wait_ends() {
  if (waits_ != Clock::time_point()) seconds_.exposed += seconds_since(std::exchange(waits_, {}));
  if (!open_.empty()) ahead_ = Clock::now();
}

void Reducer::count_hidden() {
  if (ahead_ != Clock::time_point()) seconds_.hidden += seconds_since(std::exchange(ahead_, {}));
}

Reducer::Seconds Reducer::seconds() const {
  std::lock_guard lock(mutex_);
  return seconds_;
}

// A device sends no notification, so its event is polled. Other ranks may fail meanwhile.
bool Reducer::may_begin(const Exchange& exchange) {
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

void Reducer::begin_due(std::list<UnderWay>& waiting, std::list<UnderWay>& under_way) {
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
std::size_t Reducer::end_finished(std::list<UnderWay>& under_way) {
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

void Reducer::run() {
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

}  // namespace tandem
