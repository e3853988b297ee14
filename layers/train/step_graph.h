// The step graph: a training step that is called for every batch. On a backend that records, it is recorded once and
// then replayed. A recording contains addresses and shapes, so it is valid only for batches in the same memory and of
// the same size. Other batches (a smaller last one) run the step eagerly. A step whose intermediate values are read on
// the host also runs eagerly.
//
// A step has four parts. backward and update only queue work on the device. After each of them a part runs on the host,
// which may wait for other ranks. On one machine nothing waits, and backward and update are one recording.
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
    std::function<void()> backward;       // forward and backward; on the device
    std::function<void()> exchange = {};  // on the host
    std::function<void()> update = {};    // on the device
    std::function<void()> finish = {};    // on the host
  };
  // waits: the parts on the host wait for other ranks. why_not: why no step of this run can be recorded, printed once
  // on stderr; empty: steps may be recorded.
  StepGraph(Backend& backend, bool waits, Parts parts, const std::string& why_not);
  // A replay repeats only the device work of backward and update, not their other effects.
  // eager: this step is not replayed.
  void operator()(const Batch& batch, bool eager);

 private:
  struct Key {
    const void *images = nullptr, *labels = nullptr, *samples = nullptr;
    Shape shape;
    DType dtype = DType::f32;
    std::int64_t over_ranks = 0;  // the weight of a share's gradient depends on it
    bool operator==(const Key&) const = default;
  };
  void cannot(const std::string& why);
  void run(const std::function<void()>& backward, const std::function<void()>& update) const;

  Backend& backend_;
  Parts parts_;
  std::function<void()> recorded_backward_, recorded_update_;
  Key key_;
  int other_memory_ = 0;  // consecutive batches that did not match the recording
  bool never_;
};

}  // namespace tandem
