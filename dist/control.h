// Liveness, apart from the exchange of data: a thread in every rank tells rank 0 each second what it is at, and rank 0 tells
// all of them what all are at. A rank whose connection closes has died; one that is silent for Deadlines::silence counts as
// dead too; both, and every failure that a rank reports, reach all ranks, with the rank's name. After a failure the roll call is
// answered here. A standstill of Deadlines::patience is no failure: rank 0 warns on stderr, once, and says who waits for whom.
#pragma once
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "dist/roll_call.h"
#include "dist/wire.h"

namespace tandem {

class Control {
 public:
  // Takes the connections of the rendezvous. names: "rank 2 on node7", for all ranks.
  Control(Rendezvous& rendezvous, std::vector<std::string> names, const Deadlines& deadlines,
          std::unique_ptr<RollCall> roll_call = nullptr);
  ~Control();  // says good-bye
  Control(const Control&) = delete;

  int rank() const { return rank_; }
  int size() const { return int(names_.size()); }
  const std::string& name(int rank) const { return names_[std::size_t(rank)]; }
  double deadline() const { return deadlines_.wait; }

  // Any thread.
  void check() const {  // throws CommunicationError when the job has failed
    if (failed_.load(std::memory_order_acquire)) raise();
  }
  bool gone(int rank) const { return gone_[std::size_t(rank)].load(std::memory_order_acquire); }  // said good-bye
  void stand(const Standing& standing);
  int blame(int waits_for) const;
  void fail(int culprit, const std::string& text);
  void on_failure(std::function<void()> wake);  // called once, by the thread here
  // After a failure: the ranks that still reach each other; waits for the roll call, a few seconds at most. Before: none.
  std::vector<int> survivors();

 private:
  void run();
  void call_roll();
  void take(int rank, const Standing& standing, const std::string& in);
  std::vector<Standing> standings() const;
  void warn_of_standstill();
  void failed(int culprit, const std::string& text);
  [[noreturn]] void raise() const;

  int rank_;
  std::vector<std::string> names_;
  Deadlines deadlines_;
  std::vector<int> connections_;
  mutable std::mutex mutex_;
  struct Told {
    Standing standing;
    std::string in;    // what it waits in, in words
    double since = 0;  // when it first stood so
  };
  Standing mine_;
  std::vector<Told> told_;
  bool warned_ = false;  // of this standstill
  std::vector<std::atomic<bool>> gone_;
  std::atomic<bool> failed_{false};
  std::string text_;
  int culprit_ = -1;
  std::string outgoing_;  // a failure that the thread has to tell
  std::function<void()> wake_;
  std::unique_ptr<RollCall> roll_call_;
  std::vector<int> survivors_;  // empty until the roll call is over
  std::condition_variable called_;
  bool end_ = false;
  int wake_pipe_[2];
  std::thread thread_;
};

}  // namespace tandem
