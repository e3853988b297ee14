// Wire: messages between the ranks of a job, for message_communicator.cpp; in-process (in_process.cpp) and UCX
// (ucx.cpp).
//
// A message is matched by (from, context, number, kind) and, within these, in the order of sending. When it meets the
// receive that waits for it, the rest of the two headers must be equal: a difference is a disagreement between the
// programs, and the text names both sides.
#pragma once
#include <memory>
#include <string>

#include "dist/collectives/algorithms.h"
#include "dist/collectives/communicator.h"

namespace tandem {

enum class Kind : std::uint8_t { message, broadcast, all_reduce, reduce_scatter, all_gather, barrier };
const char* name_of(Kind kind);

struct Header {
  std::uint64_t context = 0;  // of the communicator: a split has one of its own
  std::uint32_t number = 0;   // of the collective on its communicator, from 1; of a message: its tag
  Kind kind = Kind::message;
  DType dtype = DType::f32;
  Combine combine = Combine::sum;
  std::uint8_t root = 0;   // lowest byte
  std::int64_t count = 0;  // elements of the whole collective

  bool matches(const Header& o) const { return context == o.context && number == o.number && kind == o.kind; }
  bool agrees(const Header& o) const {
    return dtype == o.dtype && combine == o.combine && root == o.root && count == o.count;
  }
};
std::string describe(const Header& header);  // "all_reduce #3 (sum of 1024 f32)"

// What a rank is at: to find, when a wait is too long, who keeps all the others waiting.
struct WaitForEdge {
  int waits_for = -1;       // rank in the job; −1: for nobody
  std::uint64_t steps = 0;  // how far it is: grows from step to step, and from one collective to the next
  bool left = false;
  Header in = {};  // what it waits in
};
// Follows the waiting from `rank` to one that waits for nobody. Where ranks wait for each other in a circle a message
// was lost: to one that is behind, from the one ahead of it for which it waits.
int culprit(const std::vector<WaitForEdge>& all, int rank);

class Wire {
 public:
  virtual ~Wire() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::string where(int rank) const = 0;

  // One message under way; destroying it gives it up, and its memory is not touched afterwards.
  class Request {
   public:
    virtual ~Request() = default;
    virtual bool done() = 0;  // throws CommunicationError
  };
  virtual std::unique_ptr<Request> send(int to, const Header& header, const void* data, std::size_t bytes) = 0;
  virtual std::unique_ptr<Request> recv(int from, const Header& header, void* data, std::size_t bytes) = 0;

  virtual void progress() = 0;  // throws CommunicationError when another rank has failed
  // Until something has happened, until wake(), or a few milliseconds; looks so many times before it sleeps.
  virtual void rest(int looks) = 0;
  virtual void wake() = 0;
  virtual std::uint64_t bytes_sent() const = 0;
  virtual std::string transport() const = 0;

  // A collective begins. A wire that sees what all ranks began can name a disagreement at once.
  virtual void announce(const Header& header, int ranks) { (void)header, (void)ranks; }
  virtual void report_wait(const WaitForEdge& edge) = 0;
  // Has ended. If that was because of a failure, progress() knows of it now: ask that before you blame this rank.
  virtual bool left(int rank) const = 0;
  // After a wait of too long: who is to blame, as far as can be known. Throws CommunicationError when another rank has
  // failed.
  int blame(int waits_for) {
    const int suspect = last_in_line(waits_for);
    progress();  // a suspect that has left because of a failure has told of it before
    return suspect;
  }
  // Is alive, and waits for nobody: it may take as long as it likes.
  virtual bool works(int rank) const { return (void)rank, false; }
  virtual void fail(int culprit, const std::string& text) = 0;
  virtual std::vector<int> survivors() = 0;  // after a failure: those that still reach each other

 private:
  virtual int last_in_line(int waits_for) = 0;  // culprit() of where all ranks stand; perhaps one that has left
};

// What a communicator of messages rests on; throws for another one.
struct Messages {
  std::shared_ptr<Wire> wire;
  std::vector<int> job_ranks;  // of its ranks
  double deadline;
};
Messages messages_under(const Communicator& communicator);

// A communicator of all ranks of the wire. deadline: seconds that any wait may last.
std::unique_ptr<Communicator> over_messages(std::shared_ptr<Wire> wire, double deadline, ChoiceTable table);

}  // namespace tandem
