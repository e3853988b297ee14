// A step that is recorded once and then replayed. This file has the policy, without device code, so that it can be
// tested without a device. The first two calls run the step eagerly (plans are made, memory is allocated), the third is
// recorded, later calls are replays. A step that cannot be recorded always runs eagerly; why_eager() gives the reason.
#pragma once
#include <functional>
#include <memory>
#include <string>

#include "core/error.h"

namespace tandem {

// Thrown by operations that cannot be recorded: reading a value on the host, copying from host memory that may change.
struct NotRecordable : Error {
  using Error::Error;
};

// The operations of a device that recording needs.
class Capture {
 public:
  virtual ~Capture() = default;
  virtual void begin() = 0;
  virtual std::string end() = 0;  // returns why nothing was recorded; empty: the step was recorded
  virtual void replay() = 0;
};

class Recording {
 public:
  static constexpr int eager_calls = 2;
  Recording(std::function<void()> step, std::unique_ptr<Capture> capture)
      : step_(std::move(step)), capture_(std::move(capture)) {}

  void operator()();
  bool recorded() const { return recorded_; }
  const std::string& why_eager() const { return why_eager_; }  // empty: it is recorded, or will be

 private:
  std::function<void()> step_;
  std::unique_ptr<Capture> capture_;  // none once the step cannot be recorded
  int calls_ = 0;
  bool recorded_ = false;
  std::string why_eager_;
};

}  // namespace tandem
