#include "dist/job/port_guard.h"

#include <arpa/inet.h>
#include <linux/filter.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <set>

namespace tandem {
namespace {

int option(int socket, int name) {  // −1: it has none
  int value = -1;
  socklen_t length = sizeof value;
  return getsockopt(socket, SOL_SOCKET, name, &value, &length) == 0 ? value : -1;
}

}  // namespace

std::vector<int> listening_sockets() {
  std::vector<int> found;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", none)) {
    const int fd = std::stoi(entry.path().filename().string());
    if (option(fd, SO_ACCEPTCONN) == 1 && option(fd, SO_DOMAIN) != AF_UNIX) found.push_back(fd);
  }
  return found;
}

std::string accept_only(int socket, const std::vector<std::string>& addresses) {
  if (option(socket, SO_DOMAIN) != AF_INET) return "it listens by IPv6";
  std::set<std::uint32_t> sources;
  for (const std::string& text : addresses) {
    in_addr a{};
    if (inet_pton(AF_INET, text.c_str(), &a) != 1) return text + " is no IPv4 address";
    sources.insert(ntohl(a.s_addr));
  }
  // A packet's source lies 12 bytes into its IPv4 header.
  std::vector<sock_filter> program{BPF_STMT(BPF_LD | BPF_W | BPF_ABS, std::uint32_t(SKF_NET_OFF + 12))};
  for (std::uint32_t s : sources) {
    program.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, s, 0, 1));
    program.push_back(BPF_STMT(BPF_RET | BPF_K, 0xffffffffu));
  }
  program.push_back(BPF_STMT(BPF_RET | BPF_K, 0));
  if (program.size() > BPF_MAXINSNS) return std::to_string(sources.size()) + " addresses are too many";
  const sock_fprog filter{static_cast<unsigned short>(program.size()), program.data()};
  return setsockopt(socket, SOL_SOCKET, SO_ATTACH_FILTER, &filter, sizeof filter) == 0 ? "" : std::strerror(errno);
}

}  // namespace tandem
