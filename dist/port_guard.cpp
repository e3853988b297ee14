#include "dist/port_guard.h"

#include <arpa/inet.h>
#include <linux/filter.h>
#include <sys/socket.h>

#include <algorithm>
#include <filesystem>

namespace tandem {

std::vector<int> listening_sockets() {
  std::vector<int> found;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", none)) {
    const int fd = std::stoi(entry.path().filename().string());
    int listens = 0, family = 0;
    socklen_t length = sizeof listens;
    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &length) != 0 || !listens) continue;
    length = sizeof family;
    if (getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &family, &length) == 0 && family == AF_INET) found.push_back(fd);
  }
  return found;
}

bool hear_only(int socket, const std::vector<std::string>& addresses) {
  std::vector<std::uint32_t> sources;
  for (const std::string& text : addresses) {
    in_addr a{};
    if (inet_pton(AF_INET, text.c_str(), &a) != 1) return false;
    sources.push_back(ntohl(a.s_addr));
  }
  std::sort(sources.begin(), sources.end());
  sources.erase(std::unique(sources.begin(), sources.end()), sources.end());
  // A packet's source lies 12 bytes into its IPv4 header.
  std::vector<sock_filter> program{BPF_STMT(BPF_LD | BPF_W | BPF_ABS, std::uint32_t(SKF_NET_OFF + 12))};
  for (std::uint32_t s : sources) {
    program.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, s, 0, 1));
    program.push_back(BPF_STMT(BPF_RET | BPF_K, 0xffffffffu));
  }
  program.push_back(BPF_STMT(BPF_RET | BPF_K, 0));
  const sock_fprog filter{static_cast<unsigned short>(program.size()), program.data()};
  return program.size() <= BPF_MAXINSNS &&
         setsockopt(socket, SOL_SOCKET, SO_ATTACH_FILTER, &filter, sizeof filter) == 0;
}

}  // namespace tandem
