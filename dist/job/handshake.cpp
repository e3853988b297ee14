#include "dist/job/handshake.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <openssl/crypto.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <utility>

#include "core/error.h"

namespace tandem {
namespace {

const std::string magic("TANDEM\0\1", 8);
constexpr std::size_t nonce_bytes = 32, mac_bytes = 32, hello_bytes = 8 + 4 + 4 + nonce_bytes + mac_bytes;
constexpr double patience = 5;                     // seconds that a peer may take to authenticate
constexpr std::size_t most_unauthenticated = 256;  // at the same time; if more, the oldest is dropped

bool equal(const std::string& a, const std::string& b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

std::string word(std::uint32_t v) { return {reinterpret_cast<const char*>(&v), sizeof v}; }
std::uint32_t word_at(const std::string& s, std::size_t at) {
  std::uint32_t v;
  std::memcpy(&v, s.data() + at, sizeof v);
  return v;
}

void tune(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
}

std::string text_of(const sockaddr_storage& address, socklen_t length) {
  if (address.ss_family == AF_UNIX) return "127.0.0.1";
  char host[NI_MAXHOST] = "?";
  getnameinfo(reinterpret_cast<const sockaddr*>(&address), length, host, sizeof host, nullptr, 0, NI_NUMERICHOST);
  const std::string text = host;
  return text.starts_with("::ffff:") ? text.substr(7) : text;  // an IPv4 address at a socket for IPv4 and IPv6
}

std::pair<sockaddr_un, socklen_t> local_address(const std::string& name) {
  sockaddr_un a{};
  a.sun_family = AF_UNIX;
  const std::size_t length = name.copy(a.sun_path + 1, sizeof a.sun_path - 1);
  return {a, socklen_t(offsetof(sockaddr_un, sun_path) + 1 + length)};
}

// The kernel reports the user of a local peer. Peers by TCP prove the token instead.
bool of_another_user(int connection) {
  int domain = 0;
  ucred peer{};
  socklen_t domain_size = sizeof domain, peer_size = sizeof peer;
  getsockopt(connection, SOL_SOCKET, SO_DOMAIN, &domain, &domain_size);
  return domain == AF_UNIX &&
         (getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &peer_size) != 0 || peer.uid != geteuid());
}

// Returns a connected socket, or −1 with the reason in `why`.
int connected(const void* address, socklen_t length, double until, std::string& why) {
  const auto* a = static_cast<const sockaddr*>(address);
  const int fd = socket(a->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) {
    why = std::strerror(errno);
    return -1;
  }
  int error = connect(fd, a, length) == 0 ? 0 : errno;
  socklen_t bytes = sizeof error;
  if (error == EINPROGRESS) {
    error = ready(fd, POLLOUT, until) ? 0 : ETIMEDOUT;
    if (error == 0) getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &bytes);
  }
  if (error == 0) return fd;
  why = std::strerror(error);
  close(fd);
  return -1;
}

// Returns a socket that is bound to the address, or −1 with the reason in errno.
int bound(const void* address, socklen_t length) {
  const auto* a = static_cast<const sockaddr*>(address);
  const int on = 1, off = 0, s = socket(a->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (s < 0) return -1;
  setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  setsockopt(s, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  if (bind(s, a, length) == 0) return s;
  const int why = errno;
  close(s);
  errno = why;
  return -1;
}

[[noreturn]] void cannot_listen(const std::string& where) {
  const int why = errno;
  fail("cannot listen on ", where, ": ", std::strerror(why),
       why == EADDRINUSE ? " (ss -lxtnp shows who does; choose another port by MASTER_PORT)" : "");
}

}  // namespace

int local_socket(const std::string& name) {
  const auto [address, length] = local_address(name);
  const int s = bound(&address, length);
  if (s < 0) cannot_listen("the local socket @" + name);
  return s;
}

bool listens_locally(const std::string& name) {
  const auto [address, length] = local_address(name);
  std::string why;
  const int fd = connected(&address, length, now(), why);
  if (fd >= 0) close(fd);
  return fd >= 0;
}

int bound_socket(bool loopback, int port) {
  sockaddr_in6 six{};
  six.sin6_family = AF_INET6;
  six.sin6_port = htons(std::uint16_t(port));
  sockaddr_in four{};
  four.sin_family = AF_INET;
  four.sin_addr.s_addr = htonl(loopback ? INADDR_LOOPBACK : INADDR_ANY);
  four.sin_port = htons(std::uint16_t(port));
  int s = loopback ? -1 : bound(&six, sizeof six);  // a socket for IPv6 takes connections by IPv4 too
  if (s < 0 && (loopback || errno != EADDRINUSE)) s = bound(&four, sizeof four);
  if (s < 0) cannot_listen("port " + std::to_string(port));
  return s;
}

int port_of(int socket) {
  sockaddr_storage a{};
  socklen_t length = sizeof a;
  getsockname(socket, reinterpret_cast<sockaddr*>(&a), &length);
  return ntohs(a.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(a).sin6_port
                                       : reinterpret_cast<sockaddr_in&>(a).sin_port);
}

std::string address_of(int connection) {
  sockaddr_storage a{};
  socklen_t length = sizeof a;
  getsockname(connection, reinterpret_cast<sockaddr*>(&a), &length);
  return text_of(a, length);
}

bool is_loopback(const std::string& address) { return address == "::1" || address.starts_with("127."); }

// ---- the side that listens ------------------------------------------------------------------------------------------
void HandshakeListener::open() {
  if (listen(socket_, 512) != 0) cannot_listen("port " + std::to_string(port_of(socket_)));
}

HandshakeListener::~HandshakeListener() {
  close(socket_);
  for (UnauthenticatedPeer& s : unauthenticated_) close(s.connection);
}

std::vector<HandshakeListener::Accepted> HandshakeListener::wait(double seconds) {
  std::vector<Accepted> accepted;
  std::vector<pollfd> polled{{socket_, POLLIN, 0}};
  for (const UnauthenticatedPeer& s : unauthenticated_) polled.push_back({s.connection, POLLIN, 0});
  poll(polled.data(), polled.size(), int(seconds * 1000));

  for (std::size_t i = unauthenticated_.size(); i-- > 0;) {
    UnauthenticatedPeer& s = unauthenticated_[i];
    bool drop = now() > s.until;
    if (polled[i + 1].revents) {
      char bytes[hello_bytes];
      const ssize_t n = ::recv(s.connection, bytes, hello_bytes - s.received.size(), MSG_DONTWAIT);
      if (n > 0) s.received.append(bytes, std::size_t(n));
      drop = drop || n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
      drop = drop || s.received.compare(0, 8, magic, 0, std::min<std::size_t>(8, s.received.size())) != 0;
    }
    if (!drop && s.received.size() < hello_bytes) continue;
    if (!drop && equal(s.received.substr(16 + nonce_bytes),
                       hmac(token_, "rank" + s.nonce + s.received.substr(8, 8 + nonce_bytes)))) {
      fcntl(s.connection, F_SETFL, fcntl(s.connection, F_GETFL) & ~O_NONBLOCK);
      try {
        send_all(s.connection, hmac(token_, "zero" + s.received.substr(16, nonce_bytes) + s.nonce), now() + 1);
        accepted.push_back(
            {std::exchange(s.connection, -1), int(word_at(s.received, 8)), int(word_at(s.received, 12)), s.address});
      } catch (const Error&) {  // it has disconnected meanwhile
      }
    }
    if (s.connection >= 0) close(s.connection);
    unauthenticated_.erase(unauthenticated_.begin() + std::ptrdiff_t(i));
  }
  if (polled[0].revents & POLLIN) greet();
  return accepted;
}

void HandshakeListener::greet() {
  for (;;) {
    sockaddr_storage from{};
    socklen_t length = sizeof from;
    const int fd = accept4(socket_, reinterpret_cast<sockaddr*>(&from), &length, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) return;
    tune(fd);
    UnauthenticatedPeer s{fd, now() + patience, random_bytes(nonce_bytes), "", text_of(from, length)};
    const std::string greeting = magic + s.nonce;
    if (of_another_user(fd) ||
        ::send(fd, greeting.data(), greeting.size(), MSG_NOSIGNAL | MSG_DONTWAIT) != ssize_t(greeting.size())) {
      close(fd);
      continue;
    }
    if (unauthenticated_.size() >= most_unauthenticated) {
      close(unauthenticated_.front().connection);
      unauthenticated_.erase(unauthenticated_.begin());
    }
    unauthenticated_.push_back(std::move(s));
  }
}

// ---- the side that connects -----------------------------------------------------------------------------------------
int connect_with_token(const std::string& address, int port, const std::string& token, int rank, int ranks,
                       double seconds) {
  const double until = now() + seconds;
  const bool local = address.starts_with("@");
  const std::string there = address + (local ? "" : " port " + std::to_string(port)) + ": ";
  std::string why;
  int fd = -1;
  if (local) {
    const auto [there_address, length] = local_address(address.substr(1));
    fd = connected(&there_address, length, until, why);
  } else {
    addrinfo hints{}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    if (const int error = getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found))
      fail(address, ": ", gai_strerror(error));
    for (addrinfo* a = found; a && fd < 0; a = a->ai_next) fd = connected(a->ai_addr, a->ai_addrlen, until, why);
    freeaddrinfo(found);
  }
  if (fd < 0) fail(there, why);
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
  tune(fd);
  try {
    require(!of_another_user(fd), "another user listens there");
    const std::string greeting = receive_all(fd, magic.size() + nonce_bytes, until);
    require(greeting.compare(0, 8, magic) == 0, "something else listens there");
    const std::string theirs = greeting.substr(8), mine = random_bytes(nonce_bytes);
    const std::string who = word(std::uint32_t(rank)) + word(std::uint32_t(ranks)) + mine;
    send_all(fd, magic + who + hmac(token, "rank" + theirs + who), until);
    require(equal(receive_all(fd, mac_bytes, until), hmac(token, "zero" + mine + theirs)),
            "what listens there has another token");
  } catch (const Error& e) {
    close(fd);
    fail(there, e.what());
  }
  return fd;
}

// ---- bytes ----------------------------------------------------------------------------------------------------------
std::string hmac(const std::string& key, const std::string& text) {
  unsigned char out[EVP_MAX_MD_SIZE];
  unsigned length = 0;
  const auto* made = HMAC(EVP_sha256(), key.data(), int(key.size()),
                          reinterpret_cast<const unsigned char*>(text.data()), text.size(), out, &length);
  require(made && length == mac_bytes, "HMAC-SHA256 failed");
  return {reinterpret_cast<char*>(out), length};
}

std::string random_bytes(std::size_t count) {
  std::string s(count, '\0');
  require(RAND_bytes(reinterpret_cast<unsigned char*>(s.data()), int(count)) == 1, "no random numbers are to be had");
  return s;
}

}  // namespace tandem
