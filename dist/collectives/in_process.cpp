#include "dist/collectives/in_process.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <list>
#include <map>
#include <mutex>

#include "dist/collectives/wire.h"

namespace tandem {
namespace {

// The state that the ranks share, protected by one lock.
struct Room;

struct PendingMessage : Wire::Request {  // one side of a message
  PendingMessage(std::shared_ptr<Room> room, bool sends, int from, int to, const Header& header, void* data,
                 std::size_t bytes)
      : room(std::move(room)), sends(sends), from(from), to(to), header(header), data(data), bytes(bytes) {}
  ~PendingMessage() override;
  bool done() override;
  int owner() const { return sends ? from : to; }
  int peer() const { return sends ? to : from; }

  std::shared_ptr<Room> room;
  bool sends;
  int from, to;
  Header header;
  void* data;
  std::size_t bytes;
  std::atomic<bool> finished{false};
  std::string error;  // written before `finished`
  int culprit = -1;
};

struct Room {
  struct Side {
    WaitForEdge edge;
    bool woken = false, stopped = false;
    std::uint64_t events = 0, seen = 0;
    std::condition_variable changed;
  };
  struct Announced {
    Header header;
    int rank, ranks;
  };

  Room(int n, const InProcessOptions& o) : sides(std::size_t(n)), options(o) {}
  ~Room() {
    if (options.outcome) *options.outcome = {messages, faulty, waits_for};
  }
  Side& of(int rank) { return sides[std::size_t(rank)]; }
  void notify(int rank) {
    of(rank).events++;
    of(rank).changed.notify_all();
  }
  void notify_all() {
    for (std::size_t r = 0; r < sides.size(); r++) notify(int(r));
  }

  // Completes the message if its other side has arrived.
  void post(PendingMessage& mine) {
    const auto other = std::ranges::find_if(waiting, [&](const PendingMessage* p) {
      return p->sends != mine.sends && p->from == mine.from && p->to == mine.to && p->header.matches(mine.header);
    });
    if (other == waiting.end()) return waiting.push_back(&mine);
    PendingMessage &send = mine.sends ? mine : **other, &recv = mine.sends ? **other : mine;
    waiting.erase(other);
    if (!send.header.agrees(recv.header) || send.bytes != recv.bytes) {
      send.error = recv.error = mismatch(name(send.from), send.header, name(recv.to), recv.header);
      send.culprit = recv.culprit = send.from;
    } else if (send.bytes > 0) {
      std::memcpy(recv.data, send.data, send.bytes);
    }
    for (PendingMessage* p : {&send, &recv}) p->finished.store(true, std::memory_order_release);
    notify(send.from);
    notify(recv.to);
  }
  // Removes the messages of a killed rank at once. Otherwise others could match some of them while it unwinds.
  void forget(int rank) {
    std::erase_if(waiting, [&](const PendingMessage* p) { return p->owner() == rank; });
  }
  static std::string name(int rank) { return "rank " + std::to_string(rank); }

  std::mutex mutex;
  std::vector<Side> sides;
  std::list<PendingMessage*> waiting;  // whose other side has not arrived, in the order of the calls
  std::map<std::pair<std::uint64_t, std::uint32_t>, Announced> announced;
  InProcessOptions options;
  std::int64_t messages = 0;
  int faulty = -1, failed_rank = -1;
  std::vector<int> waits_for;
  std::string failed;  // why the job failed; empty: it has not failed
};

PendingMessage::~PendingMessage() {
  std::lock_guard lock(room->mutex);
  if (!finished) room->waiting.remove(this);
}

bool PendingMessage::done() {
  if (!finished.load(std::memory_order_acquire)) return false;
  if (!error.empty()) throw CommunicationError(culprit, error);
  return true;
}

class InProcessWire : public Wire {
 public:
  InProcessWire(std::shared_ptr<Room> room, int rank) : room_(std::move(room)), rank_(rank) {}
  ~InProcessWire() override {
    std::lock_guard lock(room_->mutex);
    room_->of(rank_).edge.left = true;
    room_->notify_all();
  }
  int rank() const override { return rank_; }
  int size() const override { return int(room_->sides.size()); }
  std::string where(int rank) const override { return Room::name(rank); }

  std::unique_ptr<Request> send(int to, const Header& header, const void* data, std::size_t bytes) override {
    // Declared before the lock, because its destructor locks.
    auto pending = std::make_unique<PendingMessage>(room_, true, rank_, to, header, const_cast<void*>(data), bytes);
    std::unique_lock lock(room_->mutex);
    bytes_ += bytes;
    if (room_->messages++ == room_->options.fault.at) {
      room_->faulty = rank_;
      switch (room_->options.fault.kind) {
        case Fault::Kind::none: break;
        case Fault::Kind::lost: pending->finished = true; return pending;
        case Fault::Kind::killed:
          room_->forget(rank_);
          lock.unlock();
          throw Killed(Room::name(rank_) + " is killed by the test");
        case Fault::Kind::stopped:
          room_->of(rank_).stopped = true;
          room_->of(rank_).changed.wait(lock, [&] { return !room_->failed.empty(); });
          throw CommunicationError(room_->failed_rank, room_->failed);
      }
    }
    room_->post(*pending);
    return pending;
  }

  std::unique_ptr<Request> recv(int from, const Header& header, void* data, std::size_t bytes) override {
    auto pending = std::make_unique<PendingMessage>(room_, false, from, rank_, header, data, bytes);
    std::lock_guard lock(room_->mutex);
    room_->post(*pending);
    return pending;
  }

  void progress() override {
    std::lock_guard lock(room_->mutex);
    Room::Side& mine = room_->of(rank_);
    mine.seen = mine.events;
    if (!room_->failed.empty()) throw CommunicationError(room_->failed_rank, room_->failed);
    for (const PendingMessage* p : room_->waiting)
      if (p->owner() == rank_ && room_->of(p->peer()).edge.left)
        throw CommunicationError(p->peer(), describe(p->header) + ": " + Room::name(rank_) + " waits for " +
                                                Room::name(p->peer()) + ", which has left");
  }

  void rest(int) override {
    std::unique_lock lock(room_->mutex);
    Room::Side& mine = room_->of(rank_);
    mine.changed.wait_for(lock, std::chrono::milliseconds(10), [&] { return mine.woken || mine.events != mine.seen; });
    mine.woken = false;
  }
  void wake() override {
    std::lock_guard lock(room_->mutex);
    room_->of(rank_).woken = true;
    room_->of(rank_).changed.notify_all();
  }
  std::uint64_t bytes_sent() const override { return bytes_; }
  std::string transport() const override { return "this process"; }

  void announce(const Header& header, int ranks) override {
    std::lock_guard lock(room_->mutex);
    auto [entry, first] =
        room_->announced.try_emplace({header.context, header.number}, Room::Announced{header, rank_, ranks});
    Room::Announced& a = entry->second;
    if (!first && (a.header.kind != header.kind || !a.header.agrees(header)))
      throw CommunicationError(rank_, mismatch(Room::name(rank_), header, Room::name(a.rank), a.header));
    if (--a.ranks == 0) room_->announced.erase(entry);
  }
  void report_wait(const WaitForEdge& edge) override {
    std::lock_guard lock(room_->mutex);
    room_->of(rank_).edge = edge;
  }
  bool left(int rank) const override {
    std::lock_guard lock(room_->mutex);
    return room_->of(rank).edge.left;
  }
  bool works(int rank) const override {
    std::lock_guard lock(room_->mutex);
    const Room::Side& s = room_->of(rank);
    return !s.stopped && !s.edge.left && s.edge.waits_for < 0;
  }
  void fail(int culprit, const std::string& text) override {
    std::lock_guard lock(room_->mutex);
    if (room_->failed.empty()) {
      room_->failed = text;
      room_->failed_rank = culprit;
      for (const Room::Side& s : room_->sides) room_->waits_for.push_back(s.edge.waits_for);
    }
    room_->notify_all();
  }
  std::vector<int> survivors() override {
    std::lock_guard lock(room_->mutex);
    std::vector<int> all;
    for (int r = 0; r < size() && !room_->failed.empty(); r++)
      if (r != room_->failed_rank) all.push_back(r);
    return all;
  }

 private:
  int last_in_line(int waits_for) override {
    std::lock_guard lock(room_->mutex);
    std::vector<WaitForEdge> all;
    for (const Room::Side& s : room_->sides) all.push_back(s.edge);
    all[std::size_t(rank_)].waits_for = waits_for;
    return culprit(all, rank_);
  }

  std::shared_ptr<Room> room_;
  int rank_;
  std::uint64_t bytes_ = 0;
};

}  // namespace

std::vector<std::unique_ptr<Communicator>> in_process(int ranks, const InProcessOptions& options) {
  require(ranks > 0, "in_process: ", ranks, " ranks");
  auto room = std::make_shared<Room>(ranks, options);
  std::vector<std::unique_ptr<Communicator>> all;
  for (int r = 0; r < ranks; r++)
    all.push_back(over_messages(std::make_shared<InProcessWire>(room, r), options.deadline, options.table));
  return all;
}

std::unique_ptr<Communicator> alone() { return std::move(in_process(1)[0]); }

}  // namespace tandem
