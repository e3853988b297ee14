// The control plane: liveness, failures and membership, on its own connections. A thread in every rank sends its state
// to rank 0 each second, and rank 0 sends the states of all ranks to all. A rank whose connection closes has died. A
// rank that is silent for Deadlines::silence counts as dead. Deaths, and failures that a rank reports, are sent to all
// ranks with the rank's name. After a failure this class runs the survivor agreement. A pause of Deadlines::patience
// without progress is not a failure: rank 0 prints one warning that names the waiting ranks and the ranks that they
// wait for.
//
// It also has the all-gather of texts, with which ranks exchange addresses before there is a communicator.
//
// In a job that continues without lost ranks, death or silence of a rank other than 0 is not a failure. Rank 0 frees
// its slot and informs all ranks. If the lost rank was only stopped and wakes up, it receives the message that it was
// given up and fails; the others do not fail. A process that rejoins through the listener of rank 0 gets the slot.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "dist/collectives/wire.h"
#include "dist/job/frames.h"
#include "dist/job/membership.h"
#include "dist/job/rendezvous.h"

namespace tandem {

class Control {
 public:
  // Takes the connections of the rendezvous, and at rank 0 its listener. survivors: the survivor agreement, which is
  // called after a failure with the ranks that are known to be lost.
  using Survivors = std::function<std::vector<int>(const std::vector<bool>& lost)>;
  Control(Rendezvous& rendezvous, const Membership& membership, const Deadlines& deadlines, Survivors survivors = {});
  ~Control();  // sends a good-bye; in a job that continues without lost ranks, not during an exception
  Control(const Control&) = delete;

  int rank() const { return rank_; }
  int size() const { return int(names_.size()); }
  std::string name(int rank) const {
    std::lock_guard lock(mutex_);
    return names_[std::size_t(rank)];
  }
  const Deadlines& deadlines() const { return deadlines_; }
  const Membership& membership() const { return membership_; }  // at the time when this rank joined
  bool goes_on() const { return membership_.goes_on; }
  // Returns the text of every rank, in the order of ranks. All ranks call it in the same order, and it waits for all;
  // at most 1 MiB each. One thread at a time. Throws Error that names a rank which has left or does not arrive.
  std::vector<std::string> gather(const std::string& mine);

  // Any thread. Throws CommunicationError if the job has failed. After a pause of this process (SIGSTOP) it first waits
  // until everything that rank 0 has sent meanwhile is read: a rank that was given up must not use the network again.
  void check() const {
    if (failed_.load(std::memory_order_acquire)) raise();
    if (paused()) wait_until_read();
  }
  bool given_up() const {  // rank 0 has given this rank up
    return failed_.load(std::memory_order_acquire) && goes_on() && culprit_ == rank_;
  }
  // The rank has sent a good-bye.
  bool gone(int rank) const { return gone_[std::size_t(rank)].load(std::memory_order_acquire); }
  bool lost(int rank) const;  // in a job that continues: it was lost at some time after this rank joined
  // Several communicators of a rank may wait at the same time; `who` identifies one of them.
  void report_wait(const void* who, const WaitForEdge& edge);
  int last_in_line(int waits_for) const;
  bool works(int rank) const;  // by its last report: it waits for no rank, and has not left
  void fail(int culprit, const std::string& text);
  // The control thread calls `wake` after a failure, a change or a good-bye; it must not wait. A null `wake` removes
  // it.
  void on_event(const void* who, std::function<void()> wake);
  // In a job that continues: the number of changes since this rank joined, and one of them, from 0.
  std::size_t changes() const { return change_count_.load(std::memory_order_acquire); }
  std::uint64_t generation() const { return membership_.generation + changes(); }
  ControlMessage change(std::size_t index) const;
  // This rank cannot reach `rank` any more, though rank 0 may. Rank 0 gives `rank` up; if it is 0, this rank is given
  // up.
  void accuse(int rank, const std::string& why);
  double longest_silence() const { return longest_silence_; }  // between two heartbeats of a live rank; seconds
  // After a failure: the ranks that still reach each other; waits for the survivor agreement, a few seconds at most.
  // Before: none.
  std::vector<int> survivors();

 private:
  using Message = ControlMessage;
  using Type = Message::Type;
  static constexpr std::size_t longest_frame = 16 << 20;
  struct Peer {  // at rank 0 one for each rank, on other ranks one for rank 0
    int fd = -1;
    bool over = false;  // no more frames are expected from it
    double received_at = 0;
    FrameWriter out = {};
    FrameReader in{longest_frame};
  };
  struct Wait {  // of a rank, by its last report
    WaitForEdge edge;
    std::string in = {};  // the operation in which it waits, as text
    double since = 0;     // when this state began
  };
  void wake_thread();
  void wake_all();  // this and the next five: call with the lock held
  bool was_lost(int rank) const;
  void set_failed(int culprit, const std::string& text);
  void set_wait(int rank, const Wait& wait);
  std::vector<WaitForEdge> wait_for_graph() const;
  void warn_of_standstill();
  void failed(int culprit, const std::string& text);
  void changed(const Message& change);
  [[noreturn]] void raise() const;
  bool paused() const;  // the thread has not read for so long that rank 0 may have given this rank up
  void wait_until_read() const;

  // Used by the thread only.
  void run();
  void wait_for_events(double seconds);
  bool carry_out_orders();
  void agree_on_survivors();
  void leave();
  void send_all(const Message& message, const Peer* except = nullptr);
  void send_edges();
  void flush();
  void report(int culprit, const std::string& text);
  void receive(std::size_t peer);
  void handle(std::size_t peer, const Message& message);
  void readmit(const HandshakeListener::Accepted& accepted);
  bool admit(const HandshakeListener::Accepted& accepted);
  bool gives_up(int rank) const { return goes_on() && rank_ == 0 && rank != 0; }
  bool is_lost(std::size_t peer) const { return rank_ == 0 && slots_[peer].lost; }

  const int rank_;
  const Membership membership_;
  const Deadlines deadlines_;
  std::vector<MemberSlot> slots_;  // the current slots, at rank 0; this and the next five: used by the thread only
  std::vector<Peer> peers_;
  std::unique_ptr<RendezvousListener> listener_;
  const Survivors find_survivors_;
  double looked_at_ = 0;
  bool warned_ = false;             // a warning was printed for the current standstill
  std::atomic<double> read_at_{0};  // the thread has read everything that arrived before this time
  std::atomic<double> longest_silence_{0};
  std::vector<std::atomic<bool>> gone_;
  std::atomic<bool> failed_{false};
  std::atomic<std::size_t> change_count_{0};
  mutable std::mutex mutex_;  // for the following
  std::condition_variable event_;
  std::vector<std::string> names_;
  std::map<const void*, WaitForEdge> own_waits_;  // of the communicators that wait
  std::vector<Wait> waits_;                       // by rank
  std::string text_;
  int culprit_ = -1;
  std::vector<Message> changes_;
  std::vector<Message> orders_;  // messages of other threads that the thread has to send
  std::map<const void*, std::function<void()>> wake_;
  std::map<std::uint64_t, std::vector<std::optional<std::string>>> texts_;  // of gatherings in progress
  std::uint64_t gatherings_ = 0;
  std::vector<int> survivors_;  // empty until the survivor agreement is over
  bool end_ = false, leaves_well_ = true;
  int wake_pipe_[2];
  std::thread thread_;
};

}  // namespace tandem
