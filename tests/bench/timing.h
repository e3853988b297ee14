// For benches and tests: how long something takes, medians, the memory of the process, the priorities of its threads.
#pragma once
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "core/clock.h"

namespace tandem {

// Of one call, the mean of so many.
template <class F>
double seconds_of(const F& f, std::int64_t times = 1) {
  const auto begin = Clock::now();
  for (std::int64_t i = 0; i < times; i++) f();
  return seconds_since(begin) / double(times);
}
template <class F>
double milliseconds(const F& f, std::int64_t times = 1) {
  return 1e3 * seconds_of(f, times);
}

inline double cpu_seconds() {  // of all threads of this process
  timespec t{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

inline double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v.empty() ? 0 : v[v.size() / 2];
}

// A field of a file in /proc/self, as "VmRSS:", in bytes.
inline std::size_t of_this_process(const std::string& field, const char* file = "/proc/self/status") {
  std::ifstream in(file);
  for (std::string word; in >> word;)
    if (std::size_t kib; word == field && in >> kib) return kib * 1024;
  return 0;
}

// A bench may have a real-time priority (chrt -f 10), so that other work does not disturb it. Threads of equal priority
// then do not take turns. Therefore the threads that move bytes get a higher priority than the thread that computes.
inline void helpers_first() {
  sched_param mine{};
  if (sched_getscheduler(0) != SCHED_FIFO || sched_getparam(0, &mine) != 0) return;
  const sched_param above{.sched_priority = mine.sched_priority + 1};
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task"))
    if (const int id = std::atoi(task.path().filename().c_str()); id != getpid())
      sched_setscheduler(id, SCHED_FIFO, &above);
}

}  // namespace tandem
