#include <atomic>
#include <csignal>
#include <ctime>
#include <mutex>

#include "layers/train/callbacks/callbacks.h"

namespace tandem {
namespace {

// Ctrl-C, SIGTERM and a terminal that is closed (SIGHUP) ask for a stop at the next step; a second one ends the program at once.
// Ranks may be threads of one process: a signal stops them all.
std::atomic<int> stop_signal = 0, stopped_by = 0;
static_assert(std::atomic<int>::is_always_lock_free, "a handler may write to it");

double now() {  // what a handler may call
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

class StopOnSignal : public Callback {
 public:
  StopOnSignal() {
    std::lock_guard lock(mutex_);
    if (trainings_++ > 0) return;
    stop_signal = 0, stopped_by = 0;
    struct sigaction action {};
    action.sa_handler = handle;
    action.sa_flags = SA_RESTART;
    for (auto& [number, name, before] : handled_) {
      sigaction(number, &action, &before);
      if (before.sa_handler == SIG_IGN) sigaction(number, &before, nullptr);  // in the background, under nohup
    }
  }
  ~StopOnSignal() override {
    std::lock_guard lock(mutex_);
    if (--trainings_ > 0) return;
    stop_signal = 0;
    for (auto& [number, name, before] : handled_) sigaction(number, &before, nullptr);
  }

  void step_end(Run& run) override {
    if (stop_signal) run.request_stop(name_of(stop_signal));
  }
  void stopped(Run& run) override {
    stopped_by = stop_signal.load();
    if (stopped_by) run.reason = name_of(stopped_by);
  }

  static const char* name_of(int signal) {
    for (auto& [number, name, before] : handled_)
      if (number == signal) return name;
    return "";
  }

 private:
  static void handle(int number) {
    static volatile double first;
    if (!stop_signal) {
      first = now();
      stop_signal = number;
    } else if (now() - first > 0.1) {  // timeout(1) sends its one signal twice
      std::signal(number, SIG_DFL);
      std::raise(number);
    }
  }
  struct Handled {
    int number;
    const char* name;
    struct sigaction before;
  };
  static inline Handled handled_[3] = {{SIGINT, "SIGINT", {}}, {SIGTERM, "SIGTERM", {}}, {SIGHUP, "SIGHUP", {}}};
  static inline std::mutex mutex_;
  static inline int trainings_ = 0;  // in this process, now: the first takes the signals, the last gives them back
};

}  // namespace

int stopping_signal() { return stopped_by; }
bool asked_to_stop() { return stop_signal != 0; }
std::shared_ptr<Callback> stop_on_signal() { return std::make_shared<StopOnSignal>(); }

}  // namespace tandem
