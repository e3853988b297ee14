// Wire: messages between the ranks of a job, for message_communicator.cpp. Implementations: in-process (in_process.cpp)
// and UCX (ucx.cpp).
//
// A message is matched by (from, context, number, kind), and among equal ones in the order of sending. When it matches
// a waiting receive, the rest of the two headers must be equal. A difference means that the ranks' programs differ, and
// the error text names both sides.
#pragma once
#include <memory>
#include <string>

#include "dist/collectives/algorithms.h"
#include "dist/collectives/communicator.h"

namespace tandem {

using Kind = Call::Kind;
struct Header {
  std::uint64_t context = 0;  // of the communicator: each split has its own
  std::uint32_t number = 0;   // of the collective on its communicator, from 1; for a message: its tag
  Kind kind = Kind::send;     // also on the side that receives
  DType dtype = DType::f32;
  Combine combine = Combine::sum;
  std::uint8_t root = 0;   // lowest byte
  std::int64_t count = 0;  // elements of the whole collective

  bool matches(const Header& o) const { return context == o.context && number == o.number && kind == o.kind; }
  bool agrees(const Header& o) const {  // with a header that matches
    return dtype == o.dtype && combine == o.combine && root == o.root && count == o.count;
  }
};
Header header_of(const Call& call, std::uint32_t number, std::uint64_t context = 0);
std::string describe(const Header& header);  // "all_reduce #3 (sum of 1024 f32)"
// "rank 1 calls … where rank 0 calls …"
std::string mismatch(const std::string& one, const Header& ones, const std::string& other, const Header& others);

// The state of a rank's wait. After too long a wait, these edges show which rank delays all others.
struct WaitForEdge {
  int waits_for = -1;       // rank in the job; −1: none
  std::uint64_t steps = 0;  // progress: increases with every step and every collective
  bool left = false;
  Header in = {};  // the operation in which it waits
};
// Follows the edges from `rank` to a rank that waits for none. If ranks wait for each other in a cycle, a message was
// lost. Then the result is its sender: the rank that is furthest ahead of a rank that waits for it.
int culprit(const std::vector<WaitForEdge>& all, int rank);

class Wire {
 public:
  virtual ~Wire() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::string where(int rank) const = 0;

  // A message in progress. Destroying it abandons it; its memory is not accessed afterwards.
  class Request {
   public:
    virtual ~Request() = default;
    virtual bool done() = 0;  // throws CommunicationError
  };
  virtual std::unique_ptr<Request> send(int to, const Header& header, const void* data, std::size_t bytes) = 0;
  virtual std::unique_ptr<Request> recv(int from, const Header& header, void* data, std::size_t bytes) = 0;

  virtual void progress() = 0;  // throws CommunicationError when another rank has failed
  // Sleeps until an event occurs, until wake(), or for a few milliseconds; polls `looks` times before it sleeps.
  virtual void rest(int looks) = 0;
  virtual void wake() = 0;
  virtual std::uint64_t bytes_sent() const = 0;
  virtual std::string transport() const = 0;

  // Called when a collective begins. A wire that receives the announcements of all ranks can report a difference at
  // once.
  virtual void announce(const Header& header, int ranks) { (void)header, (void)ranks; }
  virtual void report_wait(const WaitForEdge& edge) = 0;
  // True if the rank has ended. If a failure was the cause, progress() throws it now: call that before naming this
  // rank.
  virtual bool left(int rank) const = 0;
  // After a wait beyond the deadline: throws CommunicationError for the rank at fault, as far as it can be determined.
  // Returns if that rank works, or throws the failure that another rank has reported.
  void waited_too_long(int waits_for, const std::string& text) {
    const int suspect = last_in_line(waits_for);
    progress();  // a rank that left because of a failure has reported it before
    if (works(suspect)) return;
    throw CommunicationError(suspect, text + (suspect == waits_for ? "" : ", which waits for " + where(suspect)));
  }
  // True if the rank is alive and waits for none: there is no deadline for it.
  virtual bool works(int rank) const { return (void)rank, false; }
  virtual void fail(int culprit, const std::string& text) = 0;
  virtual std::vector<int> survivors() = 0;  // after a failure: the ranks that still reach each other

 private:
  virtual int last_in_line(int waits_for) = 0;  // culprit() of the current edges of all ranks; that rank may have left
};

// The basis of a communicator with messages; messages_under() throws for other communicators.
struct Messages {
  std::shared_ptr<Wire> wire;
  std::vector<int> job_ranks;  // the job ranks of the communicator's ranks
  double deadline;
};
Messages messages_under(const Communicator& communicator);

// A communicator of all ranks of the wire. deadline: seconds that any wait may last.
std::unique_ptr<Communicator> over_messages(std::shared_ptr<Wire> wire, double deadline, ChoiceTable table);

}  // namespace tandem
