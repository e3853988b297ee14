// The threads that share a kernel's work: a team per calling thread, made at its first parallel call and kept.
//
// An idle worker looks for work for a bounded time, then sleeps, so that other programs can use the cores soon after
// this one stops using them. The caller does not wait for a worker that has not begun: it runs that part itself. The
// result of a part depends on its number and not on the thread that runs it, so results do not depend on the load of
// the machine.
#pragma once
#include <atomic>
#include <csignal>

namespace tandem {

// The default number of threads of a backend: OMP_NUM_THREADS, else the cores that this process may use: those of its
// affinity mask, and no more than the quota of its cgroup (cpu.max; v1: cpu.cfs_quota_us) rounded up.
int default_threads();

// While an object of this class exists, signals are blocked on the calling thread. Threads that are started meanwhile
// keep them blocked permanently. Signals of a fault in the program (SIGSEGV and the like) are not blocked. Reason:
// kernels of oneDNN up to 3.11 point the stack register into the heap, so a signal handler that runs during a kernel
// overwrites heap memory (github.com/uxlfoundation/oneDNN/issues/4845).
class SignalsWait {
 public:
  SignalsWait();
  ~SignalsWait() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsWait(const SignalsWait&) = delete;

 private:
  sigset_t before_;
};

namespace team {
using Call = void (*)(const void* body, int part);
// Calls call(body, part) for every part in [0, parts), at least for part 0: part 0 on the calling thread, each other
// part on a worker of its own, or on the calling thread if that reaches the part first. So a part may wait for another
// part: that part has ended, is running, or will be started by its worker. A call from inside a part runs its parts one
// after another. An exception in a part ends the process.
void run(int parts, Call call, const void* body);
bool inside();  // whether this thread runs a part

// At wait() all parts of one call wait for each other.
class Barrier {
 public:
  explicit Barrier(int parts) : parts_(parts) {}
  void wait();

 private:
  const int parts_;
  std::atomic<int> arrived_{0}, round_{0};
};
}  // namespace team

// Calls body(part) for every part in [0, parts), shared among the threads of the team.
template <class Body>
void in_parts(int parts, const Body& body) {
  team::run(
      parts, [](const void* b, int part) { (*static_cast<const Body*>(b))(part); }, &body);
}

}  // namespace tandem
