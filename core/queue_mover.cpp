#include "core/queue_mover.h"

#include "core/machine.h"
#include "core/text.h"

namespace tandem {

QueueMover::QueueMover(Backend& backend, std::size_t most)
    : backend_(backend), most_(most), fork_(backend.new_event()), out_(new_lane()), in_(new_lane()) {}

// The queue has been told to wait for every copy, so behind it nothing uses the rooms.
QueueMover::~QueueMover() {
  try {
    backend_.synchronize();
  } catch (const std::exception&) {  // the device has failed, or a recording that has failed is being left
  }
}

QueueMover::Lane QueueMover::new_lane() {
  Lane lane;
  lane.queue = backend_.new_queue();
  lane.clock = lane.queue->follower();
  return lane;
}

// A free room of this size, or a new one, or where that is refused a larger one.
QueueMover::Room QueueMover::room_for(std::size_t bytes, std::string& error) {
  const std::size_t size = CachingAllocator::size_class(bytes);
  auto found = free_.lower_bound(size);
  if (found == free_.end() || found->first != size) {
    if (taken_ + size > most_) {
      error = description() + ": " + readable_bytes(double(size)) + " more would pass the " +
              readable_bytes(double(most_)) + " that swapping may take there";
    } else {
      try {
        Room room{take(size), size, backend_.new_event()};
        taken_ += size;
        return room;
      } catch (const Error& e) {
        error = description() + ": " + e.what();
      }
    }
    if (found == free_.end()) return {};
    error.clear();
  }
  Room room = std::move(found->second);
  free_.erase(found);
  return room;
}

template <class F>
void QueueMover::begin(Lane& lane, const Copy& copy, const F& send) {
  backend_.queue().fork(*fork_);
  lane.queue->wait(*fork_);
  const bool timed = timed_ && lane.clock;
  if (timed) lane.clock->mark();
  send(*lane.queue);
  if (timed) lane.clock->mark(), lane.marked.push_back(copy.bytes);
  lane.queue->fork(*copy.room.copied);
}

Mover::CopyId QueueMover::out(const void* from, std::size_t bytes) {
  Copy copy;
  copy.bytes = bytes;
  copy.room = room_for(bytes, copy.error);
  if (copy.error.empty())
    begin(out_, copy, [&](Queue& queue) { send_out(queue, copy.room.memory.get(), from, bytes); });
  copies_.emplace(++last_, std::move(copy));
  return last_;
}

void QueueMover::in(CopyId id, void* to) {
  const Copy& copy = copies_.at(id);
  begin(in_, copy, [&](Queue& queue) { send_in(queue, to, copy.room.memory.get(), copy.bytes); });
}

bool QueueMover::done(CopyId id) {
  const Copy& copy = copies_.at(id);
  return !copy.error.empty() || copy.room.copied->done();
}

std::string QueueMover::wait(CopyId id) {
  const Copy& copy = copies_.at(id);
  if (copy.error.empty()) backend_.queue().wait(*copy.room.copied);
  return copy.error;
}

void QueueMover::forget(CopyId id) {
  if (wait(id).empty()) {
    Room& room = copies_.at(id).room;
    const std::size_t bytes = room.bytes;
    free_.emplace(bytes, std::move(room));
  }
  copies_.erase(id);
}

std::vector<Mover::Moved> QueueMover::moved() {
  for (Lane* lane : {&out_, &in_}) read(*lane);
  return Mover::moved();
}

void QueueMover::read(Lane& lane) {
  if (lane.marked.empty()) return;
  const std::vector<std::int64_t> times = lane.clock->times([this] { return std::int64_t(1e9 * now()); });
  if (lane.seconds > 1) lane.bytes /= 2, lane.seconds /= 2;  // the rate of the last second or two
  for (std::size_t k = 0; k < lane.marked.size(); k++) {
    const double from = 1e-9 * double(times[2 * k]), to = 1e-9 * double(times[2 * k + 1]);
    moved_.push_back({&lane == &out_, lane.marked[k], from, to});
    lane.bytes += double(lane.marked[k]);
    lane.seconds += to - from;
  }
  lane.marked.clear();
}

// ---- pinned copies --------------------------------------------------------------------------------------------------
namespace {

class PinnedMover final : public QueueMover {
 public:
  using QueueMover::QueueMover;
  std::string description() const override { return "pinned memory of the host"; }

 private:
  std::shared_ptr<void> take(std::size_t bytes) override { return backend_.pinned(bytes); }
  void send_out(Queue& queue, void* room, const void* from, std::size_t bytes) override {
    queue.fetch(room, from, bytes);
  }
  void send_in(Queue& queue, void* to, const void* room, std::size_t bytes) override { queue.send(to, room, bytes); }
};

}  // namespace

std::unique_ptr<Mover> pinned_mover(Backend& backend, std::size_t room) {
  return std::make_unique<PinnedMover>(backend, room ? room : available_memory() / 2);
}

}  // namespace tandem
