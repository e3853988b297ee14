#include "core/team.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "core/machine.h"
#include "core/restored.h"

namespace tandem {
namespace {

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits until ready() is true, but not longer than waking a thread costs. Returns ready().
template <class Ready>
bool spin(const Ready& ready) {
  using Clock = std::chrono::steady_clock;
  constexpr auto bound = std::chrono::microseconds(50);
  for (auto begin = Clock::now(); Clock::now() - begin < bound;)
    for (int i = 0; i < 16; i++) {
      if (ready()) return true;
      relax();
    }
  return ready();
}

thread_local bool inside_part = false;
class Team {
 public:
  ~Team();
  void run(int parts, team::Call call, const void* body);

 private:
  enum State : int { idle, open, asleep, leave };
  struct alignas(64) Worker {
    std::atomic<int> state{idle};  // open: the worker or the caller takes its part, whichever is first
    std::thread thread;
  };
  void work(Worker& worker, int part);
  static bool take(Worker& worker) {
    int expected = open;
    return worker.state.compare_exchange_strong(expected, idle);
  }

  const pid_t process_ = getpid();
  team::Call call_ = nullptr;  // the job; does not change while a part is open or pending
  const void* body_ = nullptr;
  std::vector<std::unique_ptr<Worker>> workers_;  // worker i has part i + 1
  alignas(64) std::atomic<int> pending_{0};       // parts that have not ended
};

void Team::run(int parts, team::Call call, const void* body) {
  while (int(workers_.size()) < parts - 1) {
    SignalsWait wait;
    workers_.push_back(std::make_unique<Worker>());
    Worker& w = *workers_.back();
    w.thread = std::thread([this, &w, part = int(workers_.size())] { work(w, part); });
  }
  const Restored part_of_it(inside_part, true);
  call_ = call;
  body_ = body;
  pending_ = parts - 1;
  for (int i = 0; i < parts - 1; i++)
    if (workers_[i]->state.exchange(open) == asleep) workers_[i]->state.notify_one();
  call(body, 0);
  for (int i = 0; i < parts - 1; i++)
    if (take(*workers_[i])) {
      call(body, i + 1);
      pending_--;
    }
  if (spin([&] { return pending_.load(std::memory_order_acquire) == 0; })) return;
  for (int left; (left = pending_) != 0;) pending_.wait(left);
}

void Team::work(Worker& worker, int part) {
  inside_part = true;
  // If the caller took the part several times in a row, other programs use this core: the worker sleeps at once.
  for (int late = 0;;) {
    if (late > 2 || !spin([&] { return worker.state.load(std::memory_order_relaxed) != idle; })) {
      int expected = idle;
      if (worker.state.compare_exchange_strong(expected, asleep)) worker.state.wait(asleep);
    }
    if (worker.state == leave) return;
    if (!take(worker)) {
      late++;
      continue;
    }
    late = 0;
    call_(body_, part);
    if (--pending_ == 0) pending_.notify_one();
  }
}

Team::~Team() {
  if (getpid() != process_) {  // after fork() there are no workers to wait for
    for (auto& w : workers_) w->thread.detach();
    return;
  }
  for (auto& w : workers_) {
    w->state = leave;
    w->state.notify_one();
  }
  for (auto& w : workers_) w->thread.join();
}

}  // namespace

SignalsWait::SignalsWait() {
  sigset_t all;
  sigfillset(&all);
  for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT}) sigdelset(&all, fault);
  pthread_sigmask(SIG_SETMASK, &all, &before_);
}

int default_threads() {
  cpu_set_t mask;
  const int cores = sched_getaffinity(0, sizeof mask, &mask) == 0
                        ? CPU_COUNT(&mask)
                        : int(std::max(1u, std::thread::hardware_concurrency()));
  if (const char* asked = std::getenv("OMP_NUM_THREADS"))
    if (const int n = std::atoi(asked); n > 0) return std::min(n, 4 * cores);
  return std::max(1, int(std::min(double(cores), std::ceil(core_quota()))));
}

namespace team {

bool inside() { return inside_part; }

void Barrier::wait() {
  const int round = round_;
  if (++arrived_ == parts_) {
    arrived_ = 0;
    round_++;
    round_.notify_all();
  } else if (!spin([&] { return round_.load(std::memory_order_acquire) != round; })) {
    round_.wait(round);
  }
}

void run(int parts, Call call, const void* body) {
  if (inside_part || parts <= 1) {
    for (int part = 0; part < std::max(1, parts); part++) call(body, part);
    return;
  }
  static thread_local Team team;
  team.run(parts, call, body);
}

}  // namespace team
}  // namespace tandem
