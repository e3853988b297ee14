#include "dist/job/frames.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "core/error.h"

namespace tandem {
namespace {

using Length = std::uint32_t;
constexpr std::size_t longest_alone = 16 << 20;  // of send_frame()

std::string framed(const std::string& bytes) {
  const auto length = Length(bytes.size());
  return std::string(reinterpret_cast<const char*>(&length), sizeof length) + bytes;
}

Length length_in(const std::string& bytes, std::size_t longest) {
  Length length;
  std::memcpy(&length, bytes.data(), sizeof length);
  require(length <= longest, "a frame of ", length, " bytes is too long");
  return length;
}

}  // namespace

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void FrameWriter::put(const std::string& bytes) { queue_.push_back(framed(bytes)); }

void FrameWriter::flush(int connection) {
  while (!queue_.empty()) {
    const std::string& first = queue_.front();
    const ssize_t n = ::send(connection, first.data() + sent_, first.size() - sent_, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return;
    sent_ += std::size_t(n);
    if (sent_ < first.size()) continue;
    queue_.pop_front();
    sent_ = 0;
  }
}

FrameReader::Got FrameReader::receive(int connection) {
  char some[4096];
  for (bool any = false;; any = true) {
    const ssize_t n = ::recv(connection, some, sizeof some, MSG_DONTWAIT);
    if (n > 0) {
      bytes_.append(some, std::size_t(n));
      continue;
    }
    if (any) return Got::bytes;  // the next call reports the end, if it is the end
    return n < 0 && (errno == EAGAIN || errno == EINTR) ? Got::nothing : Got::end;
  }
}

std::optional<std::string> FrameReader::next() {
  if (bytes_.size() < sizeof(Length)) return {};
  const Length length = length_in(bytes_, longest_);
  if (bytes_.size() < sizeof length + length) return {};
  std::string frame = bytes_.substr(sizeof length, length);
  bytes_.erase(0, sizeof length + length);
  return frame;
}

// ---- single frames --------------------------------------------------------------------------------------------------
bool ready(int connection, short events, double until) {
  for (;;) {
    pollfd p{connection, events, 0};
    const double left = until - now();
    const int n = poll(&p, 1, left <= 0 ? 0 : std::min(1000, int(left * 1000) + 1));
    if (n > 0) return true;
    if (n < 0 && errno != EINTR) return false;
    if (left <= 0) return false;
  }
}

void send_all(int connection, const std::string& bytes, double until) {
  for (std::size_t at = 0; at < bytes.size();) {
    if (!ready(connection, POLLOUT, until)) fail("the connection takes no more");
    const ssize_t n = ::send(connection, bytes.data() + at, bytes.size() - at, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno != EAGAIN && errno != EINTR) fail("the connection is lost: ", std::strerror(errno));
    if (n > 0) at += std::size_t(n);
  }
}

std::string receive_all(int connection, std::size_t count, double until) {
  std::string bytes(count, '\0');
  for (std::size_t at = 0; at < count;) {
    if (!ready(connection, POLLIN, until)) fail("the other side says nothing");
    const ssize_t n = ::recv(connection, bytes.data() + at, count - at, MSG_DONTWAIT);
    if (n == 0) fail("the other side has closed the connection");
    if (n < 0 && errno != EAGAIN && errno != EINTR) fail("the connection is lost: ", std::strerror(errno));
    if (n > 0) at += std::size_t(n);
  }
  return bytes;
}

void send_frame(int connection, const std::string& bytes, double seconds) {
  require(bytes.size() <= longest_alone, "a frame of ", bytes.size(), " bytes is too long");
  send_all(connection, framed(bytes), now() + seconds);
}

std::string receive_frame(int connection, double seconds) {
  const double until = now() + seconds;
  return receive_all(connection, length_in(receive_all(connection, sizeof(Length), until), longest_alone), until);
}

}  // namespace tandem
