// strangers COUNT SEED HOST:PORT…: so many connections to these ports, from somebody who does not belong there: noise,
// half a greeting, the greeting of another job, what was overheard of this one, messages in the form of UCX's that say
// nonsense, and silence, which stays as long as there is room. Prints how many could say something.
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <random>
#include <string>
#include <vector>

namespace {

// A connection, or one that may become one when it is answered.
int visit(const addrinfo* there) {
  const int fd = socket(there->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (connect(fd, there->ai_addr, there->ai_addrlen) == 0 || errno == EINPROGRESS) return fd;
  close(fd);
  return -1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: strangers COUNT SEED HOST:PORT…\n");
    return 2;
  }
  const long count = std::atol(argv[1]);
  std::mt19937 random(static_cast<unsigned>(std::atol(argv[2])));
  std::vector<addrinfo*> places;
  for (int i = 3; i < argc; i++) {
    const std::string place = argv[i];
    addrinfo hints{}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    const auto colon = place.rfind(':');
    if (colon == place.npos ||
        getaddrinfo(place.substr(0, colon).c_str(), place.substr(colon + 1).c_str(), &hints, &found) != 0) {
      std::fprintf(stderr, "strangers: there is no %s\n", argv[i]);
      return 2;
    }
    places.push_back(found);
  }
  constexpr std::size_t room = 300;  // connections that stay open
  std::deque<int> silent;
  long refused = 0, unanswered = 0, came = 0;
  std::string overheard = std::string("TANDEM\0\1", 8) + std::string(104, 'x');
  auto keep = [&](int fd) {
    silent.push_back(fd);
    if (silent.size() > room) close(silent.front()), silent.pop_front();
  };
  for (long i = 0; i < count; i++) {
    const int fd = visit(places[static_cast<std::size_t>(i) % places.size()]);
    pollfd p{fd, POLLOUT, 0};
    if (fd >= 0 && poll(&p, 1, 1) == 0) {
      unanswered++;
      keep(fd);
      continue;
    }
    int error = fd < 0;
    socklen_t length = sizeof error;
    if (fd >= 0) getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
    if (error) {
      refused++;
      if (fd >= 0) close(fd);
      continue;
    }
    came++;
    std::string said;
    auto noise = [&](std::size_t n) {
      while (n--) said += static_cast<char>(random());
    };
    switch (random() % 6) {
      case 0: break;
      case 1: noise(1 + random() % 300); break;
      case 2: said.assign("TANDEM\0\1", 8), said.resize(1 + random() % 40); break;
      case 3: said.assign("TANDEM\0\1\1\0\0\0\3\0\0\0", 16), noise(64); break;
      case 4: said = overheard; break;
      default: {
        const std::uint64_t magic = 0xCAFEBABE12345678u;  // of UCX's TCP
        said.assign(reinterpret_cast<const char*>(&magic), 8);
        noise(random() % 200);
        if (random() % 2 && said.size() > 13) said[8] = char(0xff), std::memset(&said[10], 0, 3);
      }
    }
    if (!said.empty()) (void)!send(fd, said.data(), said.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    char answer[256];
    p.events = POLLIN;
    if (i % 64 == 0 && poll(&p, 1, 5) > 0) {  // now and then it listens, too
      const ssize_t n = recv(fd, answer, sizeof answer, MSG_DONTWAIT);
      if (n >= 40) overheard = std::string(answer, static_cast<std::size_t>(n)) + std::string(72, 'y');
    }
    said.empty() || random() % 4 == 0 ? keep(fd) : void(close(fd));
  }
  for (int fd : silent) close(fd);
  std::printf("%ld came, %ld were refused, %ld had no answer\n", came, refused, unanswered);
}
