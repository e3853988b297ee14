// Channel: messages that go where their header says. The parameter server's workers and servers are bound to no order of
// calls: a message is a header and some bytes, and the one who receives it says, from the header, which memory the bytes go
// to. In-process and UCX twins; both strict about memory: it is the caller's until the send is done.
//
//   channel->on_message({.place = [&](int from, const Note& note) { return room_for(note); },
//                        .arrived = [&](int from, const Note& note, std::span<std::byte> bytes) { … }});
//   channel->send(server, note, bytes).wait();
//
// A send that is done has left this rank's memory; it has not been applied anywhere: answers say that. Threads: one at a time;
// the callbacks run inside progress(), wait() and done(), and must not call the channel's own functions except send().
#pragma once
#include <array>
#include <functional>
#include <memory>
#include <span>

#include "dist/communicator.h"

namespace tandem {

// The first eight words of a message; what they mean is its sender's and receiver's matter.
using Note = std::array<std::uint64_t, 8>;

struct Receiver {
  // Memory for `bytes` bytes, alive until `arrived`; shorter: the message is refused, and the job fails with a text.
  std::function<std::span<std::byte>(int from, const Note& note, std::size_t bytes)> place;
  std::function<void(int from, const Note& note, std::span<std::byte> bytes)> arrived;
};

class Channel {
 public:
  virtual ~Channel() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual void on_message(Receiver receiver) = 0;  // before any message comes; messages wait until then
  virtual Work send(int to, const Note& note, std::span<const std::byte> bytes = {}) = 0;  // `to` may be this rank
  virtual bool progress() = 0;  // true when a message has arrived. Throws CommunicationError
  virtual void rest() = 0;      // sleeps until something may have happened, or a few milliseconds
  virtual void wake() = 0;      // any thread
};

// Ranks that are threads. A send is done when its bytes are in the receiver's memory.
std::vector<std::unique_ptr<Channel>> in_process_channels(int ranks, double deadline = 300);

}  // namespace tandem
