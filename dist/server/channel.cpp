#include "dist/server/channel.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <set>
#include <tuple>
#include <utility>

#include "core/random.h"
#include "dist/collectives/in_process.h"

namespace tandem {
namespace {

std::string name(int rank) { return "rank " + std::to_string(rank); }

struct Parcel {
  int from, to;
  std::uint64_t incarnation;  // of its sender
  MessageHeader header;
  std::span<const std::byte> bytes;
  enum State { waiting, taken, delivered } state = waiting;  // taken: its bytes are being copied
  std::uint64_t ripe = 0;                                    // with delays: the first look that may deliver it
  bool again = false;                                        // a duplicate
  bool of_the_dead = false;                                  // its sender is lost and does not wait for it
  std::vector<std::byte> left = {};                          // then a copy of its bytes, as in a network
};

// A loss or a rejoin of a rank. All ranks receive all events in this order.
struct Event {
  int rank;
  std::uint64_t incarnation;  // 0: lost
  std::string why;
};

// The state of a rank: the actual state, or the state that another rank has derived from its events so far.
struct State {
  bool lost = false;
  std::uint64_t incarnation = 0;
};

// All data that the ranks share, protected by one lock.
struct Hub {
  Hub(int ranks, const ChannelFaults& f) : sides(std::size_t(ranks)), faults(f) {}
  ~Hub() {
    if (faults.sends) *faults.sends = sends;
  }
  struct Block {
    std::shared_ptr<void> memory;
    std::size_t bytes;
  };
  struct Side {
    std::deque<std::shared_ptr<Parcel>> inbox;
    State state;
    bool left = false, woken = false;
    std::int64_t sends = 0;                      // of all its incarnations
    std::vector<std::vector<Block>> blocks{{}};  // by incarnation
  };
  Side& of(int rank) { return sides[std::size_t(rank)]; }
  void fail(int rank, const std::string& text) {
    if (failed.empty()) failed = text, culprit = rank;
    changed.notify_all();
  }
  // Messages to it are dropped. Its messages may still arrive at ranks that have not received the event of its loss.
  void lose(int rank, const std::string& why) {
    changed.notify_all();
    if (rank == 0) return fail(0, why);
    of(rank).state.lost = true;
    for (Side& s : sides)
      for (auto& p : s.inbox)
        if (p->from == rank && !std::exchange(p->of_the_dead, true)) {
          p->left.assign(p->bytes.begin(), p->bytes.end());
          p->bytes = p->left;
        }
    for (auto& p : of(rank).inbox) p->state = Parcel::delivered;
    of(rank).inbox.clear();
    events.push_back({rank, 0, why});
  }

  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Side> sides;
  std::vector<Event> events;
  ChannelFaults faults;
  std::int64_t sends = 0;
  std::string failed;
  int culprit = -1;
};

class InProcessChannel : public Channel {
 public:
  InProcessChannel(std::shared_ptr<Hub> hub, int rank, double deadline)
      : hub_(std::move(hub)),
        rank_(rank),
        deadline_(deadline),
        incarnation_(hub_->of(rank).state.incarnation),
        heard_(hub_->events.size()),
        chance_(hub_->faults.delays, Stream::test, std::uint32_t(rank), std::uint32_t(incarnation_)) {
    for (const Hub::Side& s : hub_->sides) known_.push_back(s.state);
  }
  ~InProcessChannel() override {
    std::lock_guard lock(hub_->mutex);
    if (killed_) return;
    if (std::uncaught_exceptions() > 0 && hub_->failed.empty())
      hub_->lose(rank_, name(rank_) + " has left with an error");
    else
      hub_->of(rank_).left = true;
    hub_->changed.notify_all();
  }
  int rank() const override { return rank_; }
  int size() const override { return int(known_.size()); }
  std::string where(int rank) const override { return name(rank); }
  std::uint64_t incarnation() const override { return incarnation_; }
  std::vector<bool> living() const override {
    std::vector<bool> all;
    std::lock_guard lock(hub_->mutex);
    for (const State& s : known_) all.push_back(!s.lost);
    return all;
  }
  std::uint64_t generation() const override { return heard_; }
  void on_message(Receiver receiver) override { receiver_ = std::move(receiver); }

  Work send(int to, const MessageHeader& header, std::span<const std::byte> bytes) override {
    require(to >= 0 && to < size(), "send: there is no rank ", to, " of ", size());
    auto parcel = std::make_shared<Parcel>(Parcel{rank_, to, incarnation_, header, bytes});
    std::lock_guard lock(hub_->mutex);
    check();
    hub_->sends++;
    const std::int64_t index = hub_->of(rank_).sends++;
    for (const ChannelFaults::Death& d : hub_->faults.deaths)
      if (d.rank == rank_ && d.at == index) {
        killed_ = true;
        hub_->lose(rank_, name(rank_) + " is killed by the test");
        check();
      }
    if (!reaches(to)) return {};
    hub_->of(to).inbox.push_back(parcel);
    hub_->changed.notify_all();
    return Work(std::make_unique<Sending>(*this, parcel));
  }

  bool progress() override {
    std::shared_ptr<Parcel> parcel;
    Event event{-1, 0, ""};
    {
      std::lock_guard lock(hub_->mutex);
      check();
      if (!receiver_.place) return false;
      looks_++;
      if (hear(event)) {
        if (!event.incarnation && !receiver_.lost) hub_->fail(event.rank, event.why), check();
      } else if ((parcel = next())) {
        parcel->state = Parcel::taken;
      } else {
        return false;
      }
    }
    if (!parcel) {
      if (!event.incarnation)
        receiver_.lost(event.rank, event.why);
      else if (receiver_.returned)
        receiver_.returned(event.rank, event.incarnation);
      return true;
    }
    std::optional<std::span<std::byte>> placed;
    std::vector<std::byte> unplaced;
    std::span<std::byte> room;
    bool fits = false;
    {
      struct Delivered {  // also when the receiver throws
        InProcessChannel& channel;
        Parcel& parcel;
        ~Delivered() {
          std::lock_guard lock(channel.hub_->mutex);
          parcel.state = Parcel::delivered;
          channel.hub_->changed.notify_all();
        }
      } delivered{*this, *parcel};
      placed = receiver_.place(parcel->from, parcel->header, parcel->bytes.size());
      if (!placed) unplaced.resize(parcel->bytes.size());
      room = placed.value_or(unplaced);
      fits = room.size() == parcel->bytes.size();
      if (fits && !room.empty()) std::memcpy(room.data(), parcel->bytes.data(), room.size());
    }
    if (!fits) {
      std::lock_guard lock(hub_->mutex);
      hub_->fail(parcel->from, name(parcel->from) + " sends " + std::to_string(parcel->bytes.size()) + " bytes where " +
                                   name(rank_) + " has room for " + std::to_string(room.size()));
      check();
    }
    if (placed)
      receiver_.arrived(parcel->from, parcel->header, room);
    else
      receiver_.unplaced(parcel->from, parcel->header, std::move(unplaced));
    return true;
  }

  void rest() override {
    std::unique_lock lock(hub_->mutex);
    const auto& inbox = hub_->of(rank_).inbox;
    // Checks soon again for messages that are held back.
    const bool held = receiver_.place && delays() && (!inbox.empty() || heard_ < hub_->events.size());
    hub_->changed.wait_for(lock, std::chrono::microseconds(held ? 50 : 5000), [&] {
      return hub_->of(rank_).woken || !hub_->failed.empty() ||
             (receiver_.place && !held && (!inbox.empty() || heard_ < hub_->events.size()));
    });
    hub_->of(rank_).woken = false;
  }
  void wake() override {
    std::lock_guard lock(hub_->mutex);
    hub_->of(rank_).woken = true;
    hub_->changed.notify_all();
  }

  std::shared_ptr<void> share(std::size_t bytes) override {
    std::shared_ptr<void> memory(::operator new(bytes, std::align_val_t(64)),
                                 [](void* p) { ::operator delete(p, std::align_val_t(64)); });
    std::memset(memory.get(), 0, bytes);
    std::lock_guard lock(hub_->mutex);
    hub_->of(rank_).blocks[std::size_t(incarnation_)].push_back({memory, bytes});
    return memory;
  }
  std::span<std::byte> shared_by(int rank, int number) override {
    require(rank >= 0 && rank < size(), "shared_by: there is no rank ", rank, " of ", size());
    std::lock_guard lock(hub_->mutex);
    const State &known = known_[std::size_t(rank)], &is = hub_->of(rank).state;
    const auto& blocks = hub_->of(rank).blocks[std::size_t(known.incarnation)];
    if (!hub_->faults.shared_memory || number < 0 || std::size_t(number) >= blocks.size()) return {};
    // A block of an ended process can be reached only if it was reached before.
    const std::tuple block{rank, known.incarnation, number};
    if ((is.lost || is.incarnation != known.incarnation) && !reached_.count(block)) return {};
    reached_.insert(block);
    const Hub::Block& b = blocks[std::size_t(number)];
    return {static_cast<std::byte*>(b.memory.get()), b.bytes};  // the hub keeps it until the last channel is destroyed
  }
  void fail(int culprit, const std::string& text) override {
    std::lock_guard lock(hub_->mutex);
    hub_->fail(culprit, text);
  }

 private:
  friend std::unique_ptr<Channel> tandem::in_process_return(Channel& other, int rank);

  // ---- under the lock -----------------------------------------------------------------------------------------------
  void check() const {
    if (killed_) throw Killed(name(rank_) + " is killed by the test");
    if (!hub_->failed.empty()) throw CommunicationError(hub_->culprit, hub_->failed);
  }
  bool delays() const { return hub_->faults.delays != 0; }
  std::uint32_t draw(std::uint32_t below) { return chance_.word(drawn_++) % below; }

  // False if the rank was lost, or has rejoined and this rank has not received the event: messages to the old process
  // are dropped.
  bool reaches(int to) const {
    const State &known = known_[std::size_t(to)], &is = hub_->of(to).state;
    return !known.lost && !is.lost && known.incarnation == is.incarnation;
  }
  bool hear(Event& event) {
    if (heard_ == hub_->events.size() || (delays() && draw(4) != 0)) return false;
    event = hub_->events[heard_++];
    known_[std::size_t(event.rank)].lost = event.incarnation == 0;
    if (event.incarnation == 0)
      std::erase_if(hub_->of(rank_).inbox, [&](const auto& p) {
        return p->from == event.rank && p->incarnation == known_[std::size_t(event.rank)].incarnation;
      });
    if (event.incarnation) known_[std::size_t(event.rank)].incarnation = event.incarnation;
    return true;
  }
  // Removes the next message that may be delivered from the inbox: the first, or with delays the first of any sender.
  std::shared_ptr<Parcel> next() {
    auto& inbox = hub_->of(rank_).inbox;
    std::vector<std::shared_ptr<Parcel>> first;
    std::vector<bool> seen(known_.size(), false);
    for (const auto& p : inbox) {
      if (seen[std::size_t(p->from)]) continue;
      seen[std::size_t(p->from)] = true;
      const State& sender = known_[std::size_t(p->from)];
      if (sender.lost || sender.incarnation != p->incarnation) continue;  // its rejoin was not received yet
      if (delays() && p->ripe == 0) p->ripe = looks_ + (draw(4) == 0 ? draw(12) : 0);
      if (p->ripe > looks_) continue;
      first.push_back(p);
      if (!delays()) break;
    }
    if (first.empty()) return nullptr;
    auto parcel = first.size() > 1 ? first[draw(std::uint32_t(first.size()))] : first[0];
    inbox.erase(std::find(inbox.begin(), inbox.end(), parcel));
    const bool may = delays() && hub_->faults.duplicates && parcel->bytes.empty() && parcel->from != rank_;
    if (may && !parcel->again && draw(8) == 0) {
      inbox.push_back(std::make_shared<Parcel>(*parcel));
      inbox.back()->ripe = 0;
      inbox.back()->again = true;
    }
    return parcel;
  }

  class Sending : public Work::Operation {
   public:
    Sending(InProcessChannel& channel, std::shared_ptr<Parcel> parcel)
        : channel_(channel), parcel_(std::move(parcel)) {}
    ~Sending() override {  // given up: its memory must not be read any more
      std::unique_lock lock(channel_.hub_->mutex);
      auto& inbox = channel_.hub_->of(parcel_->to).inbox;
      if (parcel_->of_the_dead) return;
      if (auto at = std::find(inbox.begin(), inbox.end(), parcel_); at != inbox.end()) inbox.erase(at);
      channel_.hub_->changed.wait(lock,
                                  [&] { return parcel_->state != Parcel::taken || parcel_->to == parcel_->from; });
    }
    bool advance() override {
      if (!delivered()) channel_.progress();
      return delivered();
    }
    void wait() override {
      const auto begin = std::chrono::steady_clock::now();
      while (!advance()) {
        if (std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() > channel_.deadline_)
          throw CommunicationError(parcel_->to,
                                   name(parcel_->to) + " does not take a message of " + name(parcel_->from));
        channel_.rest();
      }
    }

   private:
    bool delivered() {
      std::lock_guard lock(channel_.hub_->mutex);
      if (parcel_->state == Parcel::delivered) return true;
      channel_.check();  // a rank that left because another one failed is not the cause
      if (channel_.hub_->of(parcel_->to).left)
        throw CommunicationError(parcel_->to,
                                 name(parcel_->from) + " sends a message to " + name(parcel_->to) + ", which has left");
      return false;
    }
    InProcessChannel& channel_;
    std::shared_ptr<Parcel> parcel_;
  };

  std::shared_ptr<Hub> hub_;
  int rank_;
  double deadline_;
  std::uint64_t incarnation_;
  Receiver receiver_;
  bool killed_ = false;
  std::size_t heard_;                                      // events received
  std::vector<State> known_;                               // the states after these events
  std::set<std::tuple<int, std::uint64_t, int>> reached_;  // rank, incarnation, block number
  std::uint64_t looks_ = 1;
  Philox chance_;
  std::uint32_t drawn_ = 0;
};

}  // namespace

std::vector<std::unique_ptr<Channel>> in_process_channels(int ranks, double deadline, const ChannelFaults& faults) {
  require(ranks > 0, "in_process_channels: ", ranks, " ranks");
  auto hub = std::make_shared<Hub>(ranks, faults);
  std::vector<std::unique_ptr<Channel>> all;
  for (int r = 0; r < ranks; r++) all.push_back(std::make_unique<InProcessChannel>(hub, r, deadline));
  return all;
}

std::unique_ptr<Channel> in_process_return(Channel& other, int rank) {
  auto* channel = dynamic_cast<InProcessChannel*>(&other);
  require(channel, "in_process_return: of another kind of channel");
  Hub& hub = *channel->hub_;
  std::lock_guard lock(hub.mutex);
  require(rank > 0 && rank < int(hub.sides.size()) && hub.of(rank).state.lost, "in_process_return: ", name(rank),
          " is not lost");
  Hub::Side& side = hub.of(rank);
  side.state = {false, side.state.incarnation + 1};
  side.left = false;
  side.blocks.push_back({});
  hub.events.push_back({rank, side.state.incarnation, ""});
  hub.changed.notify_all();
  return std::make_unique<InProcessChannel>(channel->hub_, rank, channel->deadline_);
}

}  // namespace tandem
