#include "dist/collectives/staged.h"

#include <algorithm>
#include <deque>
#include <list>
#include <map>
#include <utility>

#include "core/clock.h"
#include "dist/collectives/operations.h"

namespace tandem {
namespace {

// A call of the host's communicator is made for each chunk, in order, on pinned memory.
struct Chunked : OperationQueue::Operation {
  Chunked(OperationQueue& queue, const Call& call, int rank, std::size_t chunk_bytes)
      : Operation(queue, call, header_of(call, 0)),
        chunk(std::int64_t(chunk_bytes / size_of(call.data.dtype))),
        chunks(std::max<std::int64_t>(1, (call.data.count + chunk - 1) / chunk)) {
    const bool copy = call.kind == Kind::broadcast;
    fetches = call.kind != Kind::recv && call.kind != Kind::barrier && !(copy && rank != call.peer);
    sends = call.kind != Kind::send && call.kind != Kind::barrier && !(copy && rank == call.peer);
  }
  std::int64_t chunk;   // elements
  std::int64_t chunks;  // at least one, so that the other ranks detect an empty call
  std::int64_t begun = 0, ended = 0;
  bool fetches, sends;  // the chunk: from the device before the call; to it afterwards
};

struct Slot {
  std::shared_ptr<void> memory;
  std::unique_ptr<Event> event;  // the last copy has ended
  Chunked* operation = nullptr;
  std::int64_t begin = 0, count = 0;
  Work work;
  enum class At { device, host, back } at = At::device;
  Buffer pinned() const { return {memory.get(), count, operation->call.data.dtype}; }
  void* on_device() const { return operation->call.data.at(begin); }
};

// Chunks begin, are exchanged and end in the order of the calls, which is the same on all ranks. Collectives are one
// lane, and so are the messages to each rank and those from it: a long message must not delay the start of another.
struct Lane {
  std::list<Slot> free, under_way;
  std::deque<Chunked*> queue;  // operations with chunks that have not begun
};

class Staged : public QueuedCommunicator {
 public:
  Staged(std::shared_ptr<Communicator> host, Backend& backend, const StagedOptions& options)
      : QueuedCommunicator(host->group()),
        host_(std::move(host)),
        backend_(backend),
        options_(options),
        down_(backend.new_queue()),
        up_(backend.new_queue()) {
    require(options.chunk_bytes >= 8 && options.chunks >= 1, "staged: ", options.chunks, " chunks of ",
            options.chunk_bytes, " bytes");
  }

  Work begin(const Call& call) override {
    Lane& lane = lane_of(call);
    if (lane.free.empty() && lane.under_way.empty())
      for (int i = 0; i < options_.chunks; i++)
        lane.free.push_back(
            {.memory = backend_.pinned(options_.chunk_bytes), .event = backend_.new_event(), .work = {}});
    auto operation = std::make_shared<Chunked>(*this, call, rank(), options_.chunk_bytes);
    lane.queue.push_back(operation.get());
    return Work(std::move(operation));
  }
  std::unique_ptr<Communicator> split(int color, int key) override {
    auto part = host_->split(color, key);
    return part ? staged(std::move(part), backend_, options_) : nullptr;
  }

  void wake() override { host_->wake(); }
  Traffic traffic() const override {
    const Traffic host = host_->traffic();
    return {host.bytes, "pinned memory of the host, and " + host.transport};
  }

 private:
  Lane& lane_of(const Call& call) { return lanes_[call.is_message() ? 2 * call.peer + int(call.kind) : -1]; }

  // The part of its call for one chunk.
  static Call part(const Slot& s) {
    Call call = s.operation->call;
    call.data = s.pinned();
    for (std::int64_t& c : call.cuts) c = std::clamp<std::int64_t>(c - s.begin, 0, s.count);
    return call;
  }

  bool carry_on() override {
    bool any = false, copies = false;
    for (auto& [which, lane] : lanes_) {
      while (advance(lane)) any = true;
      copies = copies || std::ranges::any_of(lane.under_way, [](const Slot& s) { return s.at != Slot::At::host; });
    }
    if (any || !copies) moved_ = Clock::now();
    return any;
  }
  void check(Operation&) override {
    if (seconds_since(moved_) > options_.deadline)
      throw CommunicationError(rank(), where(rank()) + ": a copy between device and host has not ended for " +
                                           std::to_string(int(options_.deadline)) + " s");
  }
  void begin_next(Lane& lane) {
    Chunked& o = *lane.queue.front();
    lane.under_way.splice(lane.under_way.end(), lane.free, lane.free.begin());
    Slot& s = lane.under_way.back();
    s.operation = &o;
    s.begin = o.begun++ * o.chunk;
    s.count = std::min(o.call.data.count - s.begin, o.chunk);
    s.at = Slot::At::device;
    if (o.fetches) {
      down_->fetch(s.memory.get(), s.on_device(), s.pinned().bytes());
      down_->mark(*s.event);
    }
    if (o.begun == o.chunks) lane.queue.pop_front();
  }
  // Returns true if a chunk or its exchange has begun, or if its result is in the device's memory.
  bool advance(Lane& lane) {
    bool moved = !lane.queue.empty() && !lane.free.empty(), in_order = true;
    if (moved) begin_next(lane);
    for (auto at = lane.under_way.begin(), next = at; at != lane.under_way.end(); at = next) {
      next = std::next(at);
      Slot& s = *at;
      if (s.at == Slot::At::device && in_order && (!s.operation->fetches || s.event->done())) {
        s.work = host_->begin(part(s));
        s.at = Slot::At::host;
        moved = true;
      }
      in_order = in_order && s.at != Slot::At::device;
      if (s.at == Slot::At::host && s.work.done()) {
        if (s.operation->sends) {
          up_->send(s.on_device(), s.memory.get(), s.pinned().bytes());
          up_->mark(*s.event);
        }
        s.at = Slot::At::back;
      }
      if (s.at == Slot::At::back && (!s.operation->sends || s.event->done())) {
        s.operation->over = ++s.operation->ended == s.operation->chunks;
        lane.free.splice(lane.free.end(), lane.under_way, at);
        moved = true;
      }
    }
    return moved;
  }

  // Drops the operation's chunks in flight, after the device has stopped using their memory.
  void abandon(Operation& o) override {
    Lane& lane = lane_of(o.call);
    std::erase(lane.queue, &o);
    for (auto at = lane.under_way.begin(); at != lane.under_way.end();) {
      auto next = std::next(at);
      if (at->operation == &o) {
        at->work = {};
        try {
          while (!at->event->done()) rest();
        } catch (const Error&) {  // the device has failed: no copies are made
        }
        lane.free.splice(lane.free.end(), lane.under_way, at);
      }
      at = next;
    }
  }

  std::shared_ptr<Communicator> host_;
  Backend& backend_;
  StagedOptions options_;
  std::unique_ptr<Queue> down_, up_;
  std::map<int, Lane> lanes_;  // −1: collectives; 2·rank: messages to it, 2·rank + 1: from it
  Clock::time_point moved_ = Clock::now();
};

}  // namespace

std::unique_ptr<Communicator> staged(std::shared_ptr<Communicator> host, Backend& backend,
                                     const StagedOptions& options) {
  return std::make_unique<Staged>(std::move(host), backend, options);
}

}  // namespace tandem
