// A training step that is called for every batch and, where the backend records, is recorded once and then replayed. A
// recording holds addresses and shapes: it serves the batches that come in the same memory and size as the one it was made of.
// The others (an epoch's smaller last batch) run the step itself, and so does a step that somebody looks at from the host.
//
// A step of several ranks is two recordings, backward and update, and between them the host exchanges gradients.
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
  Replay(Backend& backend, std::function<void()> step, std::string why_not) : Replay(backend, step, {}, {}, why_not) {}
  // exchange: is called each time. The last two may be empty.
  Replay(Backend& backend, std::function<void()> backward, std::function<void()> exchange, std::function<void()> update,
         std::string why_not);
  // Everything that the step does beside queueing work on the device must not matter when it is replayed.
  void operator()(const Batch& batch, bool looked_at);

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
  std::function<void()> backward_, exchange_, update_;
  std::function<void()> recorded_backward_, recorded_update_;
  Key key_;
  int strangers_ = 0;  // batches in a row that were not the recording's
  bool never_;
};

}  // namespace tandem
