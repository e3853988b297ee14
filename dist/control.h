// Liveness, apart from the exchange of data: a thread in every rank tells rank 0 each second what it is at, and rank 0 tells
// all of them what all are at. A rank whose connection closes has died; one that is silent for Deadlines::silence counts as
// dead too; both, and every failure that a rank reports, reach all ranks, with the rank's name. After a failure the roll call is
// answered here. A standstill of Deadlines::patience is no failure: rank 0 warns on stderr, once, and says who waits for whom.
//
// In a job that goes on without lost ranks, death and silence of a rank other than 0 are no failure either: rank 0 gives its
// seat up and tells all of them, the lost one too, if it should wake up: then it has failed, and the others have not. A
// process that comes back through the door of rank 0 takes the seat.
#pragma once
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "dist/roll_call.h"
#include "dist/seats.h"
#include "dist/wire.h"

namespace tandem {

class Control {
 public:
  // Takes the connections of the rendezvous. names: "rank 2 on node7", for all ranks.
  Control(Rendezvous& rendezvous, std::vector<std::string> names, const Deadlines& deadlines,
          std::unique_ptr<RollCall> roll_call = nullptr);
  // Of a job that goes on without lost ranks. Takes the door too, at rank 0.
  struct Job {
    std::uint64_t nonce = 0, incarnation = 0;  // the job's; this process's
    std::string terms;
    std::vector<Seat> seats;
  };
  Control(Rendezvous& rendezvous, Job job, const Deadlines& deadlines);
  ~Control();  // says good-bye; in a job that goes on: unless an exception is on its way
  Control(const Control&) = delete;

  int rank() const { return rank_; }
  int size() const { return int(names_.size()); }
  std::string name(int rank) const {
    std::lock_guard lock(mutex_);
    return names_[std::size_t(rank)];
  }
  const Deadlines& deadlines() const { return deadlines_; }
  double deadline() const { return deadlines_.wait; }
  const Job& job() const { return job_; }  // as it was when this rank came
  bool goes_on() const { return goes_on_; }

  // Any thread.
  void check() const {  // throws CommunicationError when the job has failed
    if (failed_.load(std::memory_order_acquire)) raise();
  }
  bool gone(int rank) const { return gone_[std::size_t(rank)].load(std::memory_order_acquire); }  // said good-bye
  void stand(const Standing& standing);
  int last_in_line(int waits_for) const;
  void fail(int culprit, const std::string& text);
  void on_failure(std::function<void()> wake);  // called once, by the thread here
  // Of a job that goes on: how many changes there were since this rank came, and one of them, from 0.
  std::size_t changes() const { return change_count_.load(std::memory_order_acquire); }
  Change change(std::size_t index) const;
  // Called with each, those before too; by the thread here, which it must not keep.
  void on_change(std::function<void(const Change&)> heard);
  // This rank reaches that one no more, though rank 0 may: it is given up, or, where that is rank 0, this rank is.
  void accuse(int rank, const std::string& why);
  // After a failure: the ranks that still reach each other; waits for the roll call, a few seconds at most. Before: none.
  std::vector<int> survivors();

 private:
  void run();
  void call_roll();
  void take(int rank, const Standing& standing, const std::string& in);
  std::vector<Standing> standings() const;
  void warn_of_standstill();
  void failed(int culprit, const std::string& text);
  void begin();
  bool let_in(const Gate::Guest& guest, std::vector<Seat>& seats);
  void changed(const Change& change);
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
  std::string outgoing_;  // a failure or accusation that the thread has to tell
  std::function<void()> wake_;
  const bool goes_on_ = false;
  Job job_;
  std::unique_ptr<Door> door_;
  std::vector<Change> changes_;
  std::atomic<std::size_t> change_count_{0};
  std::function<void(const Change&)> heard_;
  std::vector<std::pair<int, std::string>> accused_;  // at rank 0, by itself
  bool leaves_well_ = true, fails_ = false;
  std::unique_ptr<RollCall> roll_call_;
  std::vector<int> survivors_;  // empty until the roll call is over
  std::condition_variable called_;
  bool end_ = false;
  int wake_pipe_[2];
  std::thread thread_;
};

}  // namespace tandem
