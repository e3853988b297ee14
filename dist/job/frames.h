// Frames: whole messages on a TCP connection, each with its length before its bytes. The rendezvous sends and receives
// one frame at a time and waits; the control plane queues frames and never waits.
#pragma once
#include <cstdint>
#include <deque>
#include <optional>
#include <string>

namespace tandem {

// The sending side of a connection that must not block. Frames are sent whole and in order; bytes that the kernel does
// not accept stay in the queue. One thread.
class FrameWriter {
 public:
  void put(const std::string& bytes);
  // Sends as much as the kernel accepts now. If the connection is broken, drops all frames; the reader reports the end.
  void flush(int connection);
  bool empty() const { return queue_.empty(); }

 private:
  std::deque<std::string> queue_;
  std::size_t sent_ = 0;  // bytes of the first frame
};

// The receiving side.
class FrameReader {
 public:
  explicit FrameReader(std::size_t longest) : longest_(longest) {}
  enum class Got : std::uint8_t { nothing, bytes, end };  // end: the connection is closed or broken
  Got receive(int connection);                            // all available bytes; does not wait
  // The bytes of the next whole frame. Throws Error if it is too long.
  std::optional<std::string> next();

 private:
  std::string bytes_;
  std::size_t longest_;
};

// One frame, before a FrameWriter uses the connection. Both throw Error if the peer is gone or the time runs out.
void send_frame(int connection, const std::string& bytes, double seconds);
std::string receive_frame(int connection, double seconds);

double now();  // of the steady clock, in seconds

// Sends all bytes, or receives `count` bytes. `until`: see now(). They throw Error.
void send_all(int connection, const std::string& bytes, double until);
std::string receive_all(int connection, std::size_t count, double until);
bool ready(int connection, short events, double until);  // events as for poll(); false: not ready until then

}  // namespace tandem
