#include "tests/support_channels.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <utility>

#include "core/random.h"
#include "dist/collectives/in_process.h"

namespace tandem::test {
namespace {

std::string name(int rank) { return "rank " + std::to_string(rank); }

struct Parcel {
  int from, to;
  std::uint64_t incarnation;  // of its sender
  MessageHeader header;
  std::span<const std::byte> bytes;
  std::shared_ptr<const void> keep;  // owns the bytes
  bool in_place = false;             // the receiver takes them where they are, in shared memory
  std::uint64_t ripe = 0;            // with delays: the first look that may deliver it
  bool again = false;                // a duplicate
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
  struct Side {
    std::deque<std::shared_ptr<Parcel>> inbox;
    State state;
    bool left = false, woken = false;
    std::int64_t sends = 0;  // of all its incarnations
    // Its shared memory, by incarnation. Other ranks may read it until the last channel is destroyed.
    std::vector<std::vector<std::shared_ptr<void>>> blocks{{}};
  };
  Side& of(int rank) { return sides[rank]; }
  void fail(int rank, const std::string& text) {
    if (failed.empty()) failed = text, culprit = rank;
    changed.notify_all();
  }
  // Messages to it are dropped. Its messages may still arrive at ranks that have not received the event of its loss.
  void lose(int rank, const std::string& why) {
    changed.notify_all();
    if (rank == 0) return fail(0, why);
    of(rank).state.lost = true;
    of(rank).inbox.clear();
    events.push_back({rank, 0, why});
  }

  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Side> sides;
  std::vector<Event> events;
  ChannelFaults faults;
  std::string failed;
  int culprit = -1;
};

class InProcessChannel : public Channel {
 public:
  InProcessChannel(std::shared_ptr<Hub> hub, int rank)
      : hub_(std::move(hub)),
        rank_(rank),
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

  void send(int to, const MessageHeader& header, std::span<const std::byte> bytes,
            std::shared_ptr<const void> keep) override {
    require(to >= 0 && to < size(), "send: there is no rank ", to, " of ", size());
    Parcel parcel{rank_, to, incarnation_, header, bytes, std::move(keep)};
    if (const auto place = place_of(bytes.data())) {
      parcel.keep = place->memory;
      parcel.in_place = reaches(to);
    } else if (!parcel.keep) {
      const auto copy = std::make_shared<std::vector<std::byte>>(bytes.begin(), bytes.end());
      parcel.bytes = *copy;
      parcel.keep = copy;
    }
    std::lock_guard lock(hub_->mutex);
    check();
    const std::int64_t index = hub_->of(rank_).sends++;
    for (const ChannelFaults::Death& d : hub_->faults.deaths)
      if (d.rank == rank_ && d.at == index) {
        killed_ = true;
        hub_->lose(rank_, name(rank_) + " is killed by the test");
        check();
      }
    if (to != rank_ && !parcel.in_place) bytes_sent_ += std::int64_t(bytes.size());
    if (!is_known(to)) return;
    hub_->of(to).inbox.push_back(std::make_shared<Parcel>(std::move(parcel)));
    hub_->changed.notify_all();
  }
  bool sent() const override {
    std::lock_guard lock(hub_->mutex);
    for (int r = 0; r < size(); r++)
      if (sends_to(r) && !(tolerates_losses_ && hub_->of(r).left)) return false;
    return true;
  }

  bool progress() override {
    std::shared_ptr<Parcel> parcel;
    Event event{-1, 0, ""};
    {
      std::lock_guard lock(hub_->mutex);
      check();
      for (int r = 0; r < size() && !tolerates_losses_; r++)
        if (hub_->of(r).left && sends_to(r))
          throw CommunicationError(r, name(rank_) + " sends a message to " + name(r) + ", which has left");
      if (!receiver_.place) return false;
      looks_++;
      if (hear(event)) {
        if (!event.incarnation && !receiver_.lost) hub_->fail(event.rank, event.why), check();
      } else if (!(parcel = next())) {
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
    const int from = parcel->from;
    if (parcel->in_place) {
      const auto bytes = parcel->bytes;
      receiver_.shared(from, parcel->header, {const_cast<std::byte*>(bytes.data()), bytes.size()});
      return true;
    }
    std::vector<std::byte> unplaced;
    const auto placed = receiver_.place(from, parcel->header, parcel->bytes.size());
    if (!placed) unplaced.resize(parcel->bytes.size());
    const std::span<std::byte> room = placed.value_or(unplaced);
    if (room.size() != parcel->bytes.size()) {
      std::lock_guard lock(hub_->mutex);
      hub_->fail(from, name(from) + " sends " + std::to_string(parcel->bytes.size()) + " bytes where " + name(rank_) +
                           " has room for " + std::to_string(room.size()));
      check();
    }
    std::copy(parcel->bytes.begin(), parcel->bytes.end(), room.begin());
    parcel->keep.reset();
    receiver_.arrived(from, parcel->header, room);
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

  bool reaches(int rank) override {
    std::lock_guard lock(hub_->mutex);
    return hub_->faults.shared_memory && !hub_->of(rank).blocks[known_[rank].incarnation].empty();
  }
  void fail(int culprit, const std::string& text) override {
    std::lock_guard lock(hub_->mutex);
    hub_->fail(culprit, text);
  }

 private:
  friend std::unique_ptr<Channel> test::in_process_return(Channel& other, int rank);

  std::shared_ptr<void> new_block(std::size_t bytes) override {
    std::shared_ptr<void> memory(::operator new(bytes, std::align_val_t(64)),
                                 [](void* p) { ::operator delete(p, std::align_val_t(64)); });
    std::memset(memory.get(), 0, bytes);
    std::lock_guard lock(hub_->mutex);
    hub_->of(rank_).blocks[incarnation_].push_back(memory);
    return memory;
  }
  // ---- under the lock -----------------------------------------------------------------------------------------------
  void check() const {
    if (killed_) throw Killed(name(rank_) + " is killed by the test");
    if (!hub_->failed.empty()) throw CommunicationError(hub_->culprit, hub_->failed);
  }
  bool delays() const { return hub_->faults.delays != 0; }
  std::uint32_t draw(std::uint32_t below) { return chance_.word(drawn_++) % below; }

  // False if the rank was lost, or has rejoined and this rank has not received the event: messages to the old process
  // are dropped.
  bool is_known(int to) const {
    const State &known = known_[to], &is = hub_->of(to).state;
    return !known.lost && !is.lost && known.incarnation == is.incarnation;
  }
  bool sends_to(int to) const {
    return std::ranges::any_of(hub_->of(to).inbox, [&](const auto& p) {
      return p->from == rank_ && p->incarnation == incarnation_ && !p->again && to != rank_;
    });
  }
  bool hear(Event& event) {
    if (heard_ == hub_->events.size() || (delays() && draw(4) != 0)) return false;
    event = hub_->events[heard_++];
    known_[event.rank].lost = event.incarnation == 0;
    if (event.incarnation == 0)
      std::erase_if(hub_->of(rank_).inbox, [&](const auto& p) {
        return p->from == event.rank && p->incarnation == known_[event.rank].incarnation;
      });
    if (event.incarnation) known_[event.rank].incarnation = event.incarnation;
    return true;
  }
  // Removes the next message that may be delivered from the inbox: the first, or with delays the first of any sender.
  std::shared_ptr<Parcel> next() {
    auto& inbox = hub_->of(rank_).inbox;
    std::vector<std::shared_ptr<Parcel>> first;
    std::vector<bool> seen(known_.size(), false);
    for (const auto& p : inbox) {
      if (seen[p->from]) continue;
      seen[p->from] = true;
      const State& sender = known_[p->from];
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

  std::shared_ptr<Hub> hub_;
  int rank_;
  std::uint64_t incarnation_;
  Receiver receiver_;
  bool killed_ = false;
  std::size_t heard_;         // events received
  std::vector<State> known_;  // the states after these events
  std::uint64_t looks_ = 1;
  Philox chance_;
  std::uint32_t drawn_ = 0;
};

}  // namespace

std::vector<std::unique_ptr<Channel>> in_process_channels(int ranks, const ChannelFaults& faults) {
  require(ranks > 0, "in_process_channels: ", ranks, " ranks");
  auto hub = std::make_shared<Hub>(ranks, faults);
  std::vector<std::unique_ptr<Channel>> all;
  for (int r = 0; r < ranks; r++) all.push_back(std::make_unique<InProcessChannel>(hub, r));
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
  return std::make_unique<InProcessChannel>(channel->hub_, rank);
}

}  // namespace tandem::test
