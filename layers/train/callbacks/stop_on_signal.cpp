#include <atomic>
#include <csignal>
#include <cstring>
#include <ctime>
#include <mutex>

#include "layers/train/run.h"

namespace tandem {
namespace {

// Ctrl-C (SIGINT), SIGTERM and SIGHUP (the terminal was closed) request a stop after the current step. A second signal
// ends the program at once. The warning signals of batch systems also request a stop, and may be repeated.
// Ranks may be threads of one process: a signal stops them all. A program whose training has failed gets some seconds
// to close its connections and to print the error, because the launcher's SIGTERM arrives at that time.
std::atomic<int> stop_signal = 0, stopped_by = 0;
// A signal after this time ends the program; 0: the next signal requests a stop
std::atomic<double> ends_after = 0;
static_assert(std::atomic<int>::is_always_lock_free && std::atomic<double>::is_always_lock_free,
              "a handler may use them");
constexpr double to_print_the_error = 3;  // seconds

double now() {  // may be called in a signal handler
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

std::string name_of(int signal) { return std::string("SIG") + sigabbrev_np(signal); }

class StopOnSignal : public Callback {
 public:
  StopOnSignal() {
    std::lock_guard lock(mutex_);
    if (trainings_++ > 0) return;
    stop_signal = 0;
    stopped_by = 0;
    ends_after = 0;
    struct sigaction action {};
    action.sa_handler = handle;
    action.sa_flags = SA_RESTART;
    for (auto& [number, before] : handled_) {
      struct sigaction present {};
      sigaction(number, &action, &present);
      if (present.sa_handler != handle) before = present;                     // a failed training has left our handler
      if (before.sa_handler == SIG_IGN) sigaction(number, &before, nullptr);  // in the background, under nohup
    }
  }
  ~StopOnSignal() override {
    std::lock_guard lock(mutex_);
    if (--trainings_ > 0) return;
    stop_signal = 0;
    if (failed_) ends_after = now() + to_print_the_error;
    for (auto& [number, before] : handled_)
      if (!failed_) sigaction(number, &before, nullptr);
  }

  void step_end(Run& run) override {
    if (stop_signal) run.request_stop(name_of(stop_signal));
  }
  void stopped(Run& run) override {
    stopped_by = stop_signal.load();
    if (stopped_by) run.reason = name_of(stopped_by);
  }
  void failed(Run&, std::string&) override { failed_ = true; }

 private:
  static void handle(int number) {
    if (warns_of_the_end(number) || ends_after == 0) {
      if (!warns_of_the_end(number)) ends_after = now() + 0.1;  // timeout(1) sends its one signal twice
      stop_signal = number;
    } else if (now() > ends_after) {
      std::signal(number, SIG_DFL);
      std::raise(number);
    }
  }
  // The handlers that were there before
  static inline std::map<int, struct sigaction> handled_ = {{SIGINT, {}},  {SIGTERM, {}}, {SIGHUP, {}},
                                                            {SIGUSR1, {}}, {SIGUSR2, {}}, {SIGXCPU, {}}};
  static inline std::mutex mutex_;
  // Trainings that run in this process: the first installs the handlers, the last restores them
  static inline int trainings_ = 0;
  bool failed_ = false;
};

}  // namespace

bool warns_of_the_end(int signal) { return signal == SIGUSR1 || signal == SIGUSR2 || signal == SIGXCPU; }
int stopping_signal() { return stopped_by; }
bool asked_to_stop() { return stop_signal != 0; }
std::shared_ptr<Callback> stop_on_signal() { return std::make_shared<StopOnSignal>(); }

}  // namespace tandem
