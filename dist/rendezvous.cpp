#include "dist/rendezvous.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <openssl/crypto.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <thread>
#include <utility>

#include "core/error.h"
#include "dist/hosts.h"

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;
double now() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

const std::string magic("TANDEM\0\1", 8);
constexpr std::size_t nonce_bytes = 32, mac_bytes = 32, hello_bytes = 8 + 4 + 4 + nonce_bytes + mac_bytes;
constexpr std::size_t frame_limit = 16 << 20;
constexpr double patience = 5;          // seconds that a stranger may take to say who it is
constexpr std::size_t strangers = 256;  // at once; beyond, the oldest is dropped

std::string mac(const std::string& token, const std::string& text) {
  unsigned char out[EVP_MAX_MD_SIZE];
  unsigned length = 0;
  const auto* made = HMAC(EVP_sha256(), token.data(), int(token.size()),
                          reinterpret_cast<const unsigned char*>(text.data()), text.size(), out, &length);
  require(made && length == mac_bytes, "HMAC-SHA256 failed");
  return {reinterpret_cast<char*>(out), length};
}
bool equal(const std::string& a, const std::string& b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

std::string word(std::uint32_t v) { return {reinterpret_cast<const char*>(&v), sizeof v}; }
std::uint32_t word_at(const std::string& s, std::size_t at) {
  std::uint32_t v;
  std::memcpy(&v, s.data() + at, sizeof v);
  return v;
}

bool ready(int fd, short what, double until) {
  for (;;) {
    pollfd p{fd, what, 0};
    const double left = until - now();
    const int n = poll(&p, 1, left <= 0 ? 0 : std::min(1000, int(left * 1000) + 1));
    if (n > 0) return true;
    if (n < 0 && errno != EINTR) return false;
    if (left <= 0) return false;
  }
}

void send_all(int fd, const std::string& bytes, double until) {
  for (std::size_t at = 0; at < bytes.size();) {
    if (!ready(fd, POLLOUT, until)) fail("the connection takes no more");
    const ssize_t n = ::send(fd, bytes.data() + at, bytes.size() - at, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno != EAGAIN && errno != EINTR) fail("the connection is lost: ", std::strerror(errno));
    if (n > 0) at += std::size_t(n);
  }
}

std::string receive_all(int fd, std::size_t count, double until) {
  std::string bytes(count, '\0');
  for (std::size_t at = 0; at < count;) {
    if (!ready(fd, POLLIN, until)) fail("the other side says nothing");
    const ssize_t n = ::recv(fd, bytes.data() + at, count - at, MSG_DONTWAIT);
    if (n == 0) fail("the other side has closed the connection");
    if (n < 0 && errno != EAGAIN && errno != EINTR) fail("the connection is lost: ", std::strerror(errno));
    if (n > 0) at += std::size_t(n);
  }
  return bytes;
}

void tune(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
}

std::string text_of(const sockaddr* address, socklen_t length) {
  char host[NI_MAXHOST] = "?";
  getnameinfo(address, length, host, sizeof host, nullptr, 0, NI_NUMERICHOST);
  return host;
}

// Listens on all addresses, or on the loopback interface alone.
int listen_on(bool loopback, int port) {
  const int fd = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  const int on = 1, off = 0;
  auto give_up = [&](int s) {
    const int why = errno;
    if (s >= 0) close(s);
    fail("rank 0 cannot listen on port ", port, ": ", std::strerror(why),
         why == EADDRINUSE ? " (ss -ltnp shows who does; choose another one by MASTER_PORT)" : "");
  };
  if (fd >= 0 && !loopback) {
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    sockaddr_in6 a{};
    a.sin6_family = AF_INET6;
    a.sin6_addr = in6addr_any;
    a.sin6_port = htons(std::uint16_t(port));
    if (bind(fd, reinterpret_cast<sockaddr*>(&a), sizeof a) == 0 && listen(fd, 512) == 0) return fd;
    if (errno == EADDRINUSE) give_up(fd);
  }
  if (fd >= 0) close(fd);
  const int four = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  setsockopt(four, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  sockaddr_in a{};
  a.sin_family = AF_INET;
  a.sin_addr.s_addr = htonl(loopback ? INADDR_LOOPBACK : INADDR_ANY);
  a.sin_port = htons(std::uint16_t(port));
  if (four < 0 || bind(four, reinterpret_cast<sockaddr*>(&a), sizeof a) != 0 || listen(four, 512) != 0) give_up(four);
  return four;
}

int port_of(int listener) {
  sockaddr_storage a{};
  socklen_t length = sizeof a;
  getsockname(listener, reinterpret_cast<sockaddr*>(&a), &length);
  return ntohs(a.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(a).sin6_port
                                       : reinterpret_cast<sockaddr_in&>(a).sin_port);
}

// ---- the file in which ranks of one host find each other -----------------------------------------------------------------
std::string private_folder(const Variables& variables) {
  namespace fs = std::filesystem;
  const char* given = variables("XDG_RUNTIME_DIR");
  std::string folder = given && access(given, W_OK) == 0 ? given : "/tmp/tandem-" + std::to_string(getuid());
  mkdir(folder.c_str(), 0700);
  struct stat s {};
  if (lstat(folder.c_str(), &s) != 0 || !S_ISDIR(s.st_mode) || s.st_uid != getuid() || (s.st_mode & 022))
    refuse(folder, ": must be a folder that only you can write: it holds the token of a job. Or set XDG_RUNTIME_DIR");
  return folder;
}

std::string meeting_file(const Place& place, const Variables& variables) {
  return private_folder(variables) + "/tandem-" + hex(mac("name", place.job)).substr(0, 24);
}

void write_private(const std::string& path, const std::string& text) {
  const std::string fresh = path + "." + std::to_string(getpid());
  unlink(fresh.c_str());
  const int fd = open(fresh.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  const bool written = fd >= 0 && write(fd, text.data(), text.size()) == ssize_t(text.size());
  if (fd >= 0) close(fd);
  if (!written || rename(fresh.c_str(), path.c_str()) != 0) fail(path, ": cannot be written: ", std::strerror(errno));
}

}  // namespace

std::string random_bytes(std::size_t count) {
  std::string s(count, '\0');
  require(RAND_bytes(reinterpret_cast<unsigned char*>(s.data()), int(count)) == 1, "no random numbers are to be had");
  return s;
}

std::string hex(const std::string& bytes) {
  std::string s;
  for (unsigned char c : bytes) s += "0123456789abcdef"[c >> 4], s += "0123456789abcdef"[c & 15];
  return s;
}

void send_frame(int fd, const std::string& bytes, double seconds) {
  require(bytes.size() <= frame_limit, "a frame of ", bytes.size(), " bytes is too long");
  send_all(fd, word(std::uint32_t(bytes.size())) + bytes, now() + seconds);
}

std::string receive_frame(int fd, double seconds) {
  const double until = now() + seconds;
  const std::uint32_t length = word_at(receive_all(fd, 4, until), 0);
  require(length <= frame_limit, "a frame of ", length, " bytes is too long");
  return receive_all(fd, length, until);
}

Deadlines Deadlines::from(const Variables& variables) {
  Deadlines d;
  auto take = [&](const char* name, double& v) {
    const char* text = variables(name);
    if (!text || !*text) return;
    char* end = nullptr;
    v = std::strtod(text, &end);
    if (*end || !(v > 0) || v > 1e6) refuse(name, "=", text, ": expected a number of seconds");
  };
  take("TANDEM_START_TIMEOUT", d.start);
  take("TANDEM_SILENCE", d.silence);
  take("TANDEM_DEADLINE", d.wait);
  return d;
}

Rendezvous::Rendezvous(const Place& place, const Deadlines& deadlines, const Variables& variables)
    : place_(place), deadlines_(deadlines) {
  connections_.assign(std::size_t(place.rank == 0 ? place.size : 1), -1);
  if (place.size == 1) return;
  const char* given = variables("TANDEM_TOKEN");
  std::string token = given ? given : "";
  if (!token.empty() && token.size() < 16)
    refuse("TANDEM_TOKEN is shorter than 16 characters: take `openssl rand -hex 32`");
  const bool by_file = place.one_host() && token.empty();
  if (!by_file && (token.empty() || (place.master.empty() && !place.one_host())))
    refuse("ranks on several hosts (", place.family, ", ", place.size, " ranks", place.local_size > 0 ? ", " : "",
           place.local_size > 0 ? std::to_string(place.local_size) + " here" : "", ") need ",
           place.master.empty() ? "MASTER_ADDR, the host of rank 0, and " : "",
           "TANDEM_TOKEN, the same secret on all of them: TANDEM_TOKEN=$(openssl rand -hex 32)");
  const int port = place.port ? place.port : 29500;
  std::vector<std::string> hosts;  // where each rank should be, if the launcher says
  if (const char* list = variables("TANDEM_HOSTS"); list && *list)
    for (const Host& h : hosts_in_list(list)) hosts.insert(hosts.end(), std::size_t(h.slots), h.name);
  if (by_file) {
    const std::string file = meeting_file(place, variables);
    if (place.rank == 0) {
      token = hex(random_bytes(32));
      const int listener = listen_on(true, 0);
      write_private(file, std::to_string(port_of(listener)) + " " + token + "\n");
      struct Removed {
        std::string file;
        ~Removed() { unlink(file.c_str()); }
      } removed{file};
      host(token, listener, hosts);
    } else {
      join("", file, 0);
    }
  } else if (place.rank == 0) {
    host(token, listen_on(false, port), hosts);
  } else {
    join(token, place.master.empty() ? "127.0.0.1" : place.master, port);
  }
}

Rendezvous::~Rendezvous() {
  for (int fd : connections_)
    if (fd >= 0) close(fd);
}

std::vector<int> Rendezvous::take_connections() { return std::exchange(connections_, {}); }

// ---- rank 0 --------------------------------------------------------------------------------------------------------------
void Rendezvous::host(const std::string& token, int listener, const std::vector<std::string>& hosts) {
  struct Stranger {
    int fd;
    double until;
    std::string nonce, said, address;
  };
  struct Closing {
    std::vector<Stranger> list;
    int listener;
    ~Closing() {
      close(listener);
      for (Stranger& s : list)
        if (s.fd >= 0) close(s.fd);
    }
  } open{{}, listener};
  std::vector<std::string> addresses(std::size_t(place_.size));
  int missing = place_.size - 1;
  const double until = now() + deadlines_.start;
  auto tell_all = [&](const std::string& text) {
    for (int fd : connections_)
      if (fd >= 0) try {
          send_frame(fd, text, 1);
        } catch (const Error&) {  // it hears of it by the closed connection
        }
  };

  while (missing > 0) {
    if (now() > until) {
      std::string absent, present;
      for (int r = 0; r < place_.size; r++)
        if (r > 0 && connections_[std::size_t(r)] < 0)
          absent += (absent.empty() ? "" : ", ") + std::to_string(r) +
                    (hosts.size() == std::size_t(place_.size) ? " on " + hosts[std::size_t(r)] : "");
        else
          present +=
              (present.empty() ? "" : ", ") + std::to_string(r) + (r ? " from " + addresses[std::size_t(r)] : "");
      char seconds[32];
      std::snprintf(seconds, sizeof seconds, "%g", deadlines_.start);
      const std::string text = std::string("after ") + seconds + " s these ranks are missing: " + absent +
                               " (here: " + present + "). TANDEM_START_TIMEOUT gives them longer";
      tell_all("!" + text);
      fail(text);
    }
    std::vector<pollfd> polled{{listener, POLLIN, 0}};
    for (const Stranger& s : open.list) polled.push_back({s.fd, POLLIN, 0});
    poll(polled.data(), polled.size(), 200);

    for (std::size_t i = open.list.size(); i-- > 0;) {
      Stranger& s = open.list[i];
      bool drop = now() > s.until;
      if (polled[i + 1].revents) {
        char bytes[hello_bytes];
        const ssize_t n = ::recv(s.fd, bytes, hello_bytes - s.said.size(), MSG_DONTWAIT);
        if (n > 0) s.said.append(bytes, std::size_t(n));
        drop = drop || n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
        drop = drop || s.said.compare(0, 8, magic, 0, std::min<std::size_t>(8, s.said.size())) != 0;
      }
      if (!drop && s.said.size() == hello_bytes) {
        drop = true;
        const std::uint32_t rank = word_at(s.said, 8), size = word_at(s.said, 12);
        const std::string theirs = s.said.substr(16, nonce_bytes);
        if (equal(s.said.substr(16 + nonce_bytes), mac(token, "rank" + s.nonce + s.said.substr(8, 8 + nonce_bytes)))) {
          std::string refusal;
          if (int(size) != place_.size)
            refusal = "rank " + std::to_string(rank) + " was started as one of " + std::to_string(size) +
                      " ranks, and rank 0 as one of " + std::to_string(place_.size);
          else if (rank == 0 || rank >= size || connections_[rank] >= 0)
            refusal = "rank " + std::to_string(rank) + " has come twice, from " +
                      (rank < size ? addresses[rank] + " and " : "") + s.address;
          const int fd = std::exchange(s.fd, -1);
          fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
          try {
            send_all(fd, mac(token, "zero" + theirs + s.nonce), now() + 1);
            if (!refusal.empty()) send_frame(fd, "!" + refusal, 1);
          } catch (const Error&) {
            refusal = refusal.empty() ? "-" : refusal;
          }
          if (refusal.empty()) {
            connections_[rank] = fd;
            addresses[rank] = s.address;
            missing--;
          } else {
            close(fd);
            if (refusal != "-") {
              tell_all("!" + refusal);
              fail(refusal);
            }
          }
        }
      }
      if (drop) {
        if (s.fd >= 0) close(s.fd);
        open.list.erase(open.list.begin() + std::ptrdiff_t(i));
      }
    }
    if (!(polled[0].revents & POLLIN)) continue;
    for (;;) {
      sockaddr_storage from{};
      socklen_t length = sizeof from;
      const int fd = accept4(listener, reinterpret_cast<sockaddr*>(&from), &length, SOCK_CLOEXEC | SOCK_NONBLOCK);
      if (fd < 0) break;
      tune(fd);
      Stranger s{fd, now() + patience, random_bytes(nonce_bytes), "",
                 text_of(reinterpret_cast<sockaddr*>(&from), length)};
      const std::string greeting = magic + s.nonce;
      if (::send(fd, greeting.data(), greeting.size(), MSG_NOSIGNAL | MSG_DONTWAIT) != ssize_t(greeting.size())) {
        close(fd);
        continue;
      }
      if (open.list.size() >= strangers) {
        close(open.list.front().fd);
        open.list.erase(open.list.begin());
      }
      open.list.push_back(std::move(s));
    }
  }
  for (std::size_t r = 1; r < connections_.size(); r++) send_frame(connections_[r], "+", 5);  // all are here
}

// ---- the others ------------------------------------------------------------------------------------------------------------
void Rendezvous::join(const std::string& known, const std::string& where, int port) {
  const bool by_file = known.empty();
  const double until = now() + deadlines_.start;
  std::string why = "nothing was tried";
  for (double pause = 0.02; now() < until;
       std::this_thread::sleep_for(std::chrono::duration<double>(pause)), pause = std::min(1.0, pause * 1.5)) {
    std::string token = known, address = where;
    if (by_file) {
      std::ifstream file(where);
      address = "127.0.0.1";
      if (!(file >> port >> token)) {
        why = "rank 0 has not left its port in " + where;
        pause = std::min(pause, 0.1);
        continue;
      }
    }
    addrinfo hints{}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    if (const int error = getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found)) {
      why = address + ": " + gai_strerror(error);
      continue;
    }
    int fd = -1;
    for (addrinfo* a = found; a && fd < 0; a = a->ai_next) {
      fd = socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, a->ai_protocol);
      if (fd < 0) continue;
      int error = 0;
      socklen_t length = sizeof error;
      if (connect(fd, a->ai_addr, a->ai_addrlen) != 0) error = errno;
      if (error == EINPROGRESS) {
        error = ready(fd, POLLOUT, std::min(until, now() + 5)) ? 0 : ETIMEDOUT;
        if (error == 0) getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
      }
      if (error != 0) {
        why = address + " port " + std::to_string(port) + ": " + std::strerror(error);
        close(std::exchange(fd, -1));
      }
    }
    freeaddrinfo(found);
    if (fd < 0) continue;
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
    tune(fd);
    std::string verdict;
    try {
      const std::string greeting = receive_all(fd, magic.size() + nonce_bytes, now() + patience);
      require(greeting.compare(0, 8, magic) == 0, "something else listens there");
      const std::string theirs = greeting.substr(8), mine = random_bytes(nonce_bytes);
      const std::string who = word(std::uint32_t(place_.rank)) + word(std::uint32_t(place_.size)) + mine;
      send_all(fd, magic + who + mac(token, "rank" + theirs + who), now() + patience);
      require(equal(receive_all(fd, mac_bytes, now() + patience), mac(token, "zero" + mine + theirs)),
              "what listens there does not know the token");
      connections_[0] = fd;
      verdict = receive_frame(fd, std::max(1.0, until + 5 - now()));
    } catch (const Error& e) {
      close(fd);
      connections_[0] = -1;
      why = address + " port " + std::to_string(port) + ": " + e.what() +
            (by_file ? "" : " (is TANDEM_TOKEN the same on all hosts?)");
      continue;
    }
    if (verdict == "+") return;
    fail("rank 0 says: ", verdict.empty() ? "" : verdict.substr(1));
  }
  fail("rank ", place_.rank, " does not find rank 0: ", why);
}

std::vector<std::string> Rendezvous::exchange(const std::string& mine) {
  std::vector<std::string> all(std::size_t(place_.size));
  all[std::size_t(place_.rank)] = mine;
  auto with = [&](int rank, auto&& action) {
    try {
      action();
    } catch (const Error& e) {
      fail("rendezvous with rank ", rank, ": ", e.what());
    }
  };
  if (place_.rank == 0) {
    for (int r = 1; r < place_.size; r++)
      with(r, [&] { all[std::size_t(r)] = receive_frame(connections_[std::size_t(r)], deadlines_.start); });
    std::string packed;
    for (const std::string& s : all) packed += word(std::uint32_t(s.size())) + s;
    for (int r = 1; r < place_.size; r++)
      with(r, [&] { send_frame(connections_[std::size_t(r)], packed, deadlines_.start); });
  } else {
    std::string packed;
    with(0, [&] {
      send_frame(connections_[0], mine, deadlines_.start);
      packed = receive_frame(connections_[0], deadlines_.start);
    });
    std::size_t at = 0;
    for (std::string& s : all) {
      require(at + 4 <= packed.size() && at + 4 + word_at(packed, at) <= packed.size(), "rendezvous: a damaged answer");
      s = packed.substr(at + 4, word_at(packed, at));
      at += 4 + s.size();
    }
  }
  return all;
}

std::string Rendezvous::interface_address() const {
  for (int fd : connections_) {
    if (fd < 0) continue;
    sockaddr_storage a{};
    socklen_t length = sizeof a;
    getsockname(fd, reinterpret_cast<sockaddr*>(&a), &length);
    return text_of(reinterpret_cast<sockaddr*>(&a), length);
  }
  return "127.0.0.1";
}

}  // namespace tandem
