// A step that is recorded once and then replayed. The policy is here, apart from the device, so that it can be tested
// without one: two eager calls (plans are made, memory finds its place), then one that is recorded, then replays. A step
// that cannot be recorded runs eagerly ever after, and says why.
#pragma once
#include <functional>
#include <memory>
#include <string>

#include "core/error.h"

namespace tandem {

// Thrown by what a recorded step cannot hold: reading a value on the host, a copy from memory that will have changed.
struct NotRecordable : Error {
  using Error::Error;
};

// What recording asks of the device.
class Capture {
 public:
  virtual ~Capture() = default;
  virtual void begin() = 0;
  virtual std::string end() = 0;  // why nothing was recorded; empty: it was
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
