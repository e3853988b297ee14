#include "core/machine.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <string>

namespace tandem {
namespace {

// What a control group (version 2) and those around it leave; UINT64_MAX: as much as there is.
std::uint64_t left_by_groups() {
  std::string line, group;
  for (std::ifstream file("/proc/self/cgroup"); std::getline(file, line);)
    if (line.starts_with("0::/")) group = line.substr(3);
  std::uint64_t left = UINT64_MAX;
  for (; !group.empty(); group.erase(group.rfind('/'))) {
    std::uint64_t limit = 0, used = 0;  // "max" is no number
    const std::string folder = "/sys/fs/cgroup" + group;
    if (std::ifstream(folder + "/memory.max") >> limit && std::ifstream(folder + "/memory.current") >> used)
      left = std::min(left, limit - std::min(limit, used));
  }
  return left;
}

}  // namespace

std::uint64_t available_memory() {
  std::ifstream file("/proc/meminfo");
  for (std::string key, rest; file >> key && std::getline(file, rest);)
    if (key == "MemAvailable:") return std::min<std::uint64_t>(std::strtoull(rest.c_str(), nullptr, 10) * 1024, left_by_groups());
  return 0;
}

}  // namespace tandem
