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

struct Head {
  std::uint32_t length, type;
};
constexpr std::size_t longest_alone = 16 << 20;  // of send_frame()

std::string framed(std::uint32_t type, const std::string& bytes) {
  const Head head{std::uint32_t(bytes.size()), type};
  return std::string(reinterpret_cast<const char*>(&head), sizeof head) + bytes;
}

Head head_in(const std::string& bytes, std::size_t longest) {
  Head head;
  std::memcpy(&head, bytes.data(), sizeof head);
  require(head.length <= longest, "a frame of ", head.length, " bytes is too long");
  return head;
}

}  // namespace

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void FrameWriter::put(std::uint32_t type, const std::string& bytes) { queue_.push_back(framed(type, bytes)); }

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

std::optional<Frame> FrameReader::next() {
  if (bytes_.size() < sizeof(Head)) return {};
  const Head head = head_in(bytes_, longest_);
  if (bytes_.size() < sizeof head + head.length) return {};
  Frame frame{head.type, bytes_.substr(sizeof head, head.length)};
  bytes_.erase(0, sizeof head + head.length);
  return frame;
}

std::string bundle(const std::vector<std::string>& texts) {
  std::string all;
  for (const std::string& t : texts) {
    const auto size = std::uint32_t(t.size());
    all.append(reinterpret_cast<const char*>(&size), sizeof size).append(t);
  }
  return all;
}

std::vector<std::string> unbundle(const std::string& bundled) {
  std::vector<std::string> texts;
  for (std::size_t at = 0; at < bundled.size(); at += texts.back().size()) {
    std::uint32_t size = 0;
    require(bundled.size() - at >= sizeof size, "a bundle of texts is cut short");
    std::memcpy(&size, bundled.data() + at, sizeof size), at += sizeof size;
    require(bundled.size() - at >= size, "a bundle of texts is cut short");
    texts.push_back(bundled.substr(at, size));
  }
  return texts;
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
  send_all(connection, framed(0, bytes), now() + seconds);
}

std::string receive_frame(int connection, double seconds) {
  const double until = now() + seconds;
  return receive_all(connection, head_in(receive_all(connection, sizeof(Head), until), longest_alone).length, until);
}

}  // namespace tandem
