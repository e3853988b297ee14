#include "core/queue_mover.h"

#include <map>
#include <vector>

#include "core/clock.h"
#include "core/machine.h"
#include "core/text.h"

namespace tandem {
namespace {

// Order: a copy begins after a fork of the backend's queue. In wait() and forget() the backend's queue waits for the
// copy's own event. So a room may be used again at once: the next copy that uses it begins after the queue's wait for
// the last one.
class QueueMover final : public Mover {
 public:
  QueueMover(Backend& backend, OutsideMemory outside)
      : backend_(backend), outside_(std::move(outside)), fork_(backend.new_event()), out_(backend), in_(backend) {}
  // The backend's queue waits for every copy (Order), so no copy uses the rooms after this.
  ~QueueMover() override {
    try {
      backend_.synchronize();
    } catch (const std::exception&) {  // the device failed, or a failed recording ends
    }
  }

  CopyId out(const void* from, std::size_t bytes) override {
    Copy copy;
    copy.bytes = bytes;
    copy.room = room_for(bytes, copy.error);
    if (copy.error.empty())
      begin(out_, copy, [&](Queue& queue) { outside_.copy_out(queue, copy.room.memory.get(), from, bytes); });
    copies_.emplace(++last_, std::move(copy));
    return last_;
  }
  void in(CopyId id, void* to) override {
    const Copy& copy = copies_.at(id);
    begin(in_, copy, [&](Queue& queue) { outside_.copy_in(queue, to, copy.room.memory.get(), copy.bytes); });
  }
  bool done(CopyId id) override {  // must not be called in a recorded step
    const Copy& copy = copies_.at(id);
    return !copy.error.empty() || copy.room.copied->done();
  }
  std::string wait(CopyId id) override {
    const Copy& copy = copies_.at(id);
    if (copy.error.empty()) backend_.queue().wait(*copy.room.copied);
    return copy.error;
  }
  void forget(CopyId id) override {
    if (wait(id).empty()) {
      Room& room = copies_.at(id).room;
      const std::size_t bytes = room.bytes;
      free_.emplace(bytes, std::move(room));
    }
    copies_.erase(id);
  }
  double now() override { return seconds_since(began_); }
  MoverRates rates() const override { return {out_.rate.value(), in_.rate.value()}; }
  std::vector<Moved> moved() override {
    read(out_, true);
    read(in_, false);
    return Mover::moved();
  }
  void timed(bool on) override { timed_ = on; }
  std::string description() const override { return outside_.description; }

 private:
  struct Room {
    std::shared_ptr<void> memory;
    std::size_t bytes = 0;
    std::unique_ptr<Event> copied;
  };
  struct Copy {
    Room room;
    std::size_t bytes = 0;
    std::string error;
  };
  struct Lane {
    explicit Lane(Backend& backend) : queue(backend.new_queue()), clock(queue->follower()) {}
    std::unique_ptr<Queue> queue;
    std::unique_ptr<Follower> clock;  // null: the device cannot measure copies
    std::vector<std::size_t> marked;  // bytes of the copy between each pair of marks
    Rate rate;
  };

  // A free Room of this size, a new one, or, if its allocation fails, a larger free one.
  Room room_for(std::size_t bytes, std::string& error) {
    const std::size_t size = CachingAllocator::size_class(bytes);
    auto found = free_.lower_bound(size);
    if (found == free_.end() || found->first != size) {
      try {
        if (taken_ + size > outside_.most)
          fail(readable_bytes(double(size)), " more would pass the ", readable_bytes(double(outside_.most)),
               " that swapping may take there");
        Room room{outside_.take(size), size, backend_.new_event()};
        taken_ += size;
        return room;
      } catch (const Error& e) {
        if (found == free_.end()) {
          error = description() + ": " + e.what();
          return {};
        }
      }
    }
    Room room = std::move(found->second);
    free_.erase(found);
    return room;
  }

  template <class Send>
  void begin(Lane& lane, const Copy& copy, const Send& send) {
    backend_.queue().fork(*fork_);
    lane.queue->wait(*fork_);
    const bool timed = timed_ && lane.clock;
    if (timed) lane.clock->mark();
    send(*lane.queue);
    if (timed) {
      lane.clock->mark();
      lane.marked.push_back(copy.bytes);
    }
    lane.queue->fork(*copy.room.copied);
  }

  void read(Lane& lane, bool out) {
    if (lane.marked.empty()) return;
    const std::vector<std::int64_t> times = lane.clock->times([this] { return std::int64_t(1e9 * now()); });
    for (std::size_t k = 0; k < lane.marked.size(); k++) {
      const double from = 1e-9 * double(times[2 * k]), to = 1e-9 * double(times[2 * k + 1]);
      moved_.push_back({out, lane.marked[k], from, to});
      lane.rate.add(lane.marked[k], to - from);
    }
    lane.marked.clear();
  }

  Backend& backend_;
  const OutsideMemory outside_;
  const Clock::time_point began_ = Clock::now();
  std::size_t taken_ = 0;
  std::map<CopyId, Copy> copies_;
  std::multimap<std::size_t, Room> free_;  // by size
  CopyId last_ = 0;
  bool timed_ = true;
  std::unique_ptr<Event> fork_;
  Lane out_, in_;
};

}  // namespace

std::unique_ptr<Mover> queue_mover(Backend& backend, OutsideMemory outside) {
  return std::make_unique<QueueMover>(backend, std::move(outside));
}

std::unique_ptr<Mover> pinned_mover(Backend& backend, std::size_t room) {
  return queue_mover(
      backend,
      {"pinned memory of the host", room ? room : available_memory() / 2,
       [&](std::size_t bytes) { return backend.pinned(bytes); },
       [](Queue& queue, void* outside, const void* from, std::size_t bytes) { queue.fetch(outside, from, bytes); },
       [](Queue& queue, void* to, const void* outside, std::size_t bytes) { queue.send(to, outside, bytes); }});
}

}  // namespace tandem
