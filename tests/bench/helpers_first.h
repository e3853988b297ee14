// Threads of a bench that is started in real time.
#pragma once
#include <sched.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>

namespace tandem {

// On a machine that other work is using, the bench may be started in real time (chrt -f 10): there, threads of equal
// rank do not take turns, and those that move bytes must go before those that compute, as they would by themselves.
inline void helpers_first() {
  sched_param mine{};
  if (sched_getscheduler(0) != SCHED_FIFO || sched_getparam(0, &mine) != 0) return;
  const sched_param above{.sched_priority = mine.sched_priority + 1};
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task"))
    if (const int id = std::atoi(task.path().filename().c_str()); id != getpid())
      sched_setscheduler(id, SCHED_FIFO, &above);
}

}  // namespace tandem
