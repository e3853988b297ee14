// A training step that is called for every batch and, where the backend records, is recorded once and then replayed. A
// recording holds addresses and shapes: it serves the batches that come in the same memory and size as the one it was made of.
// The others (an epoch's smaller last batch) run the step itself, and so does a step that somebody looks at from the host.
#pragma once
#include <cstdint>
#include <functional>
#include <string>

#include "core/backend.h"
#include "core/batch.h"

namespace tandem {

class Replay {
 public:
  // why_not: why no step of this run can be recorded; empty: it may be. Said once, on stderr.
  Replay(Backend& backend, std::function<void()> step, std::string why_not);
  // Everything that the step does beside queueing work on the device must not matter when it is replayed.
  void operator()(const Batch& batch, bool looked_at);

 private:
  struct Key {
    const void *images = nullptr, *labels = nullptr, *samples = nullptr;
    Shape shape;
    DType dtype = DType::f32;
    bool operator==(const Key&) const = default;
  };
  void cannot(const std::string& why);

  Backend& backend_;
  std::function<void()> step_, recorded_;
  Key key_;
  int strangers_ = 0;  // batches in a row that were not the recording's
  bool never_;
};

}  // namespace tandem
