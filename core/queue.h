// Asynchronous work. A device has one queue for all operations of its backend, and further queues for copies and
// collectives. An event marks a position in a queue; the host queries whether the device has reached it. On a
// backend that computes on the host, work is done when the call returns, and events are done at once.
#pragma once
#include <cstddef>
#include <memory>

#include "core/trace/trace.h"

namespace tandem {

// An event is done when all work queued before its mark is done. An event without a mark is done. A new mark
// replaces the previous one. A mark made while a step is being recorded becomes part of the recording: each replay
// marks the event again.
class Event {
 public:
  virtual ~Event() = default;
  virtual bool done() = 0;  // may be called from any thread; throws Error when the device has failed
};

// A queue of work, carried out in order. Only one thread at a time may add work.
class Queue {
 public:
  virtual ~Queue() = default;
  virtual void mark(Event& event) = 0;  // an event of the same backend
  // A mark that only other queues wait for, not the host. In a recorded step it is an edge of the recording, and the
  // waiting queue becomes part of the recording. This queue must then wait for the work that is queued there before the
  // recording ends.
  virtual void fork(Event& event) { mark(event); }
  // Work queued here from now on runs after the event's last mark. The host does not wait.
  virtual void wait(Event& event) = 0;
  // Copies between device memory and memory from Backend::pinned(). Both must stay valid until an event marked after
  // the copy is done.
  virtual void fetch(void* pinned, const void* device, std::size_t bytes) = 0;
  virtual void send(void* device, const void* pinned, std::size_t bytes) = 0;
  // The cudaStream_t; makes its device current for the calling thread. Null without a stream
  virtual void* handle() = 0;
  // For a trace: measures the times at which the device does the work queued here
  virtual std::unique_ptr<Follower> follower() { return nullptr; }
};

}  // namespace tandem
