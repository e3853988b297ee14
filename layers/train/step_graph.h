// A training step that is called for every batch and, where the backend records, is recorded once and then replayed. A
// recording holds addresses and shapes: it serves the batches that come in the same memory and size as the one it was made of.
// The others (an epoch's smaller last batch) run the step itself, and so does a step that somebody looks at from the host.
//
// Its four parts are backward and update, which only queue work on the device, and after each of them a part on the host that
// may wait for other ranks. On one machine there is nothing to wait for, and backward and update are one recording.
#pragma once
#include <cstdint>
#include <functional>
#include <string>

#include "core/backend.h"
#include "core/batch.h"

namespace tandem {

class StepGraph {
 public:
  struct Parts {
    std::function<void()> backward;               // forward too; on the device
    std::function<void()> exchange = {};          // on the host
    std::function<void()> update = {};            // on the device
    std::function<void()> finish = {};            // on the host
  };
  // waits: the parts on the host wait for other ranks. why_not: why no step of this run can be recorded; empty: it may be. Said
  // once, on stderr.
  StepGraph(Backend& backend, bool waits, Parts parts, const std::string& why_not);
  // Everything that backward and update do beside queueing work on the device must not matter when they are replayed.
  // eager: this step is not replayed.
  void operator()(const Batch& batch, bool eager);

 private:
  struct Key {
    const void *images = nullptr, *labels = nullptr, *samples = nullptr;
    Shape shape;
    DType dtype = DType::f32;
    std::int64_t over_ranks = 0;  // the gradient of a share is weighed with it
    bool operator==(const Key&) const = default;
  };
  void cannot(const std::string& why);
  void run(const std::function<void()>& backward, const std::function<void()>& update) const;

  Backend& backend_;
  Parts parts_;
  std::function<void()> recorded_backward_, recorded_update_;
  Key key_;
  int other_memory_ = 0;  // batches in a row that were not the recording's
  bool never_;
};

}  // namespace tandem
