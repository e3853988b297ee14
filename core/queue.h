// Work that the host does not wait for. A device has queues: its own, in which all operations of its backend stand, and
// others beside it for copies and collectives. An event marks a place in a queue, and the host asks it whether the device has
// come that far. Where the host itself computes, everything is done when a call returns, and all of this is nothing.
#pragma once
#include <cstddef>

namespace tandem {

// Done when everything that was queued before its mark is done; an event that was never marked is done. A new mark replaces
// the one before. A mark that is made while a step is recorded becomes part of the recording: each replay makes it again.
class Event {
 public:
  virtual ~Event() = default;
  virtual bool done() = 0;  // any thread may ask; throws Error when the device has failed
};

// A queue of work. One thread at a time queues; what is queued is carried out in that order.
class Queue {
 public:
  virtual ~Queue() = default;
  virtual void mark(Event& event) = 0;  // of the same backend
  // Copies between memory of the device and memory from Backend::pinned(), which both stay until an event behind them is done.
  virtual void fetch(void* pinned, const void* device, std::size_t bytes) = 0;
  virtual void send(void* device, const void* pinned, std::size_t bytes) = 0;
  virtual void* handle() = 0;  // the cudaStream_t; makes its device the calling thread's. Null where there is none
};

}  // namespace tandem
