#include "core/machine.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <functional>

namespace tandem {
namespace {

// The first number in a file, or in the line that begins with `field`; −1 if there is none, or "max".
double number_in(const std::string& file, const std::string& field = "") {
  std::ifstream in(file);
  double value = -1;
  for (std::string word; !field.empty() && in >> word && word != field;) {}
  return in >> value ? value : -1;
}

// Calls look(folder) for this process's cgroup under `controller` and for all its parents; inside a container those
// above its root are not visible. cgroup v2 has one tree for all controllers.
void each_group(const std::string& controller, const std::function<void(const std::string& folder)>& look) {
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == line.npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool v2 = controllers.empty();
    if (!v2 && ("," + controllers + ",").find("," + controller + ",") == line.npos) continue;
    std::string group = line.substr(second + 1);
    for (;; group.erase(group.rfind('/'))) {
      look("/sys/fs/cgroup" + (v2 ? "" : "/" + controller) + (group == "/" ? "" : group));
      if (group.rfind('/') == group.npos) break;
    }
  }
}

}  // namespace

double core_quota() {
  double least = 1e9;
  each_group("cpu", [&](const std::string& folder) {
    double granted = 0, period = 0;
    if (std::ifstream max(folder + "/cpu.max"); max >> granted >> period && period > 0)
      least = std::min(least, granted / period);
    granted = number_in(folder + "/cpu.cfs_quota_us");
    period = number_in(folder + "/cpu.cfs_period_us");
    if (granted > 0 && period > 0) least = std::min(least, granted / period);
  });
  return least;
}

std::size_t available_memory() {
  double left = 1024 * number_in("/proc/meminfo", "MemAvailable:");
  if (left < 0) return SIZE_MAX;
  auto limit = [&](double granted, double used, double droppable) {
    if (granted >= 0 && used >= 0) left = std::min(left, std::max(0.0, granted - used + std::max(0.0, droppable)));
  };
  each_group("memory", [&](const std::string& folder) {
    limit(number_in(folder + "/memory.max"), number_in(folder + "/memory.current"),
          number_in(folder + "/memory.stat", "inactive_file"));
    limit(number_in(folder + "/memory.limit_in_bytes"), number_in(folder + "/memory.usage_in_bytes"),
          number_in(folder + "/memory.stat", "total_inactive_file"));
  });
  return std::size_t(left);
}

std::string host_name() {
  char name[256] = "localhost";
  gethostname(name, sizeof name - 1);
  return name;
}

std::string cpu_model() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);)
    if (line.rfind("model name", 0) == 0 && line.find(": ") != std::string::npos)
      return line.substr(line.find(": ") + 2);
  return "CPU";
}

}  // namespace tandem
