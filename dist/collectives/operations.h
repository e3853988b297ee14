// The operations of a communicator that are in progress, in the order of the calls. All communicators share this queue:
// waiting for one operation makes progress for all of them, and the first failure is reported to the other ranks and
// thrown by every later call.
#pragma once
#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "dist/collectives/communicator.h"
#include "dist/collectives/wire.h"

namespace tandem {

class OperationQueue {
 public:
  struct Operation : Work::Operation {
    Operation(OperationQueue& queue, const Call& call, const Header& header)
        : queue(queue), call(call), header(header) {}
    bool advance() final;
    void wait() final;
    void abandon() noexcept final;

    OperationQueue& queue;  // the derived operation keeps it alive if it may end earlier
    Call call;
    Header header;
    bool over = false;
  };
  virtual ~OperationQueue() = default;

  // Runs body. The first CommunicationError that it throws is reported to the other ranks; afterwards it always throws
  // the same error.
  template <class Body>
  void guarded(const Body& body) {
    if (failure_) throw *failure_;
    try {
      body();
    } catch (const CommunicationError& e) {
      fail(e.rank, e.what());
      throw;
    }
  }
  void fail(int culprit, const std::string& text) {
    if (failure_) return;
    failure_.emplace(culprit, text);
    report_failure(culprit, text);
  }
  Work add(std::shared_ptr<Operation> operation) {
    operations_.push_back(operation);
    return Work(std::move(operation));
  }

 protected:
  // Makes progress for all operations without waiting, and removes those that are over. Returns false if none moved.
  virtual bool carry_on() = 0;
  // Nothing has moved: checks for failed ranks and the deadline of this operation.
  virtual void check(Operation& operation) = 0;
  // As check(), in a thread that waits for the operation: sleeps until something may have moved.
  virtual void rest_for(Operation& operation) = 0;
  virtual void report_failure(int culprit, const std::string& text) = 0;
  virtual void abandon(Operation& operation) {
    std::erase_if(operations_, [&](const auto& o) { return o.get() == &operation; });
  }

  std::deque<std::shared_ptr<Operation>> operations_;

 private:
  std::optional<CommunicationError> failure_;
};

// A communicator with a queue of its own.
class QueuedCommunicator : public Communicator, public OperationQueue {
 protected:
  using Communicator::Communicator;
  // Sleeps briefly, because neither an event of a device nor two sources at once can notify this thread.
  void rest() override { std::this_thread::sleep_for(std::chrono::microseconds(20)); }
  void rest_for(Operation& operation) override {
    check(operation);
    rest();
  }
  void report_failure(int culprit, const std::string& text) override { group()->fail(culprit, text); }
};

}  // namespace tandem
