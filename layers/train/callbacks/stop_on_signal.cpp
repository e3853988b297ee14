#include <atomic>
#include <csignal>
#include <ctime>
#include <mutex>

#include "layers/train/callbacks/callbacks.h"

namespace tandem {
namespace {

// Ctrl-C, SIGTERM and a terminal that is closed (SIGHUP) ask for a stop at the next step; a second one ends the program at once.
// Ranks may be threads of one process: a signal stops them all. A program whose training has failed gets some seconds to take
// down its connections and to print the error: the launcher's SIGTERM comes meanwhile.
std::atomic<int> stop_signal = 0, stopped_by = 0;
std::atomic<double> failed_at = 0;  // 0: it has not
static_assert(std::atomic<int>::is_always_lock_free && std::atomic<double>::is_always_lock_free, "a handler may use them");
constexpr double to_print_the_error = 3;  // seconds

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
    give_back();
    stop_signal = 0, stopped_by = 0;
    struct sigaction action {};
    action.sa_handler = handle;
    action.sa_flags = SA_RESTART;
    taken_ = true;
    for (auto& [number, name, before] : handled_) {
      sigaction(number, &action, &before);
      if (before.sa_handler == SIG_IGN) sigaction(number, &before, nullptr);  // in the background, under nohup
    }
  }
  ~StopOnSignal() override {
    std::lock_guard lock(mutex_);
    if (--trainings_ > 0) return;
    stop_signal = 0;
    if (failed_) failed_at = now();
    else give_back();
  }

  void step_end(Run& run) override {
    if (stop_signal) run.request_stop(name_of(stop_signal));
  }
  void stopped(Run& run) override {
    stopped_by = stop_signal.load();
    if (stopped_by) run.reason = name_of(stopped_by);
  }
  std::string failed(Run&, const std::string&) override {
    failed_ = true;
    return "";
  }

  static const char* name_of(int signal) {
    for (auto& [number, name, before] : handled_)
      if (number == signal) return name;
    return "";
  }

 private:
  static void handle(int number) {
    static volatile double first;
    if (failed_at == 0 && !stop_signal) {
      first = now();
      stop_signal = number;
    } else if (failed_at > 0 ? now() - failed_at > to_print_the_error : now() - first > 0.1) {  // timeout(1) sends its one signal twice
      std::signal(number, SIG_DFL);
      std::raise(number);
    }
  }
  struct Handled {
    int number;
    const char* name;
    struct sigaction before;
  };
  static void give_back() {
    failed_at = 0;
    for (auto& [number, name, before] : handled_)
      if (taken_) sigaction(number, &before, nullptr);
    taken_ = false;
  }
  static inline Handled handled_[3] = {{SIGINT, "SIGINT", {}}, {SIGTERM, "SIGTERM", {}}, {SIGHUP, "SIGHUP", {}}};
  static inline std::mutex mutex_;
  static inline int trainings_ = 0;  // in this process, now: the first takes the signals, the last gives them back
  static inline bool taken_ = false;
  bool failed_ = false;
};

}  // namespace

int stopping_signal() { return stopped_by; }
bool asked_to_stop() { return stop_signal != 0; }
std::shared_ptr<Callback> stop_on_signal() { return std::make_shared<StopOnSignal>(); }

}  // namespace tandem
