#include "dist/collectives/staged.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <thread>

namespace tandem {
namespace {

class Staged;
using Clock = std::chrono::steady_clock;

// One collective or message: `call` is made for each chunk, in order, on pinned memory.
struct Operation {
  Buffer data;
  std::function<Work(Buffer pinned, std::int64_t begin)> call;
  bool fetches, sends;      // the chunk: from the device before the call; to it afterwards
  std::int64_t chunk;       // elements
  std::int64_t chunks = 0;  // at least one, so that the other ranks detect an empty call
  std::int64_t begun = 0, ended = 0;
  bool over() const { return ended == chunks; }
};

struct Slot {
  std::shared_ptr<void> memory;
  std::unique_ptr<Event> event;  // the last copy has ended
  Operation* operation = nullptr;
  std::int64_t begin = 0, count = 0;
  Work work;
  enum class At { device, host, back } at = At::device;
};

// Chunks begin, are exchanged and end in the order of the calls, which is the same on all ranks. Collectives are one
// lane, and so are the messages to each rank and those from it: a long message must not delay the start of another.
struct Lane {
  std::list<Slot> free, under_way;
  std::deque<Operation*> queue;  // operations with chunks that have not begun
};

class StagedWork : public Work::Operation {
 public:
  StagedWork(Staged& all, Lane& lane, std::unique_ptr<tandem::Operation> operation)
      : all_(all), lane_(lane), operation_(std::move(operation)) {}
  ~StagedWork() override;
  bool advance() override;
  void wait() override;

 private:
  Staged& all_;
  Lane& lane_;
  std::unique_ptr<tandem::Operation> operation_;
};

class Staged : public Communicator {
 public:
  Staged(std::shared_ptr<Communicator> host, Backend& backend, const StagedOptions& options)
      : Communicator(host->group()),
        host_(std::move(host)),
        backend_(backend),
        options_(options),
        down_(backend.new_queue()),
        up_(backend.new_queue()) {
    require(options.chunk_bytes >= 8 && options.chunks >= 1, "staged: ", options.chunks, " chunks of ",
            options.chunk_bytes, " bytes");
  }

  Work send(int to, Buffer data, int tag) override {
    return start(2 * to, data, true, false, [=, this](Buffer b, std::int64_t) { return host_->send(to, b, tag); });
  }
  Work recv(int from, Buffer data, int tag) override {
    return start(2 * from + 1, data, false, true,
                 [=, this](Buffer b, std::int64_t) { return host_->recv(from, b, tag); });
  }
  Work broadcast(Buffer data, int root) override {
    require(root >= 0 && root < size(), "broadcast: there is no rank ", root, " of ", size());
    return start(collectives, data, rank() == root, rank() != root,
                 [=, this](Buffer b, std::int64_t) { return host_->broadcast(b, root); });
  }
  Work all_reduce(Buffer data, Combine combine) override {
    return start(collectives, data, true, true,
                 [=, this](Buffer b, std::int64_t) { return host_->all_reduce(b, combine); });
  }
  Work reduce_scatter(Buffer data, Combine combine, const Cuts& cuts) override {
    return start(collectives, data, true, true, [=, this, cuts = whole(cuts, data)](Buffer b, std::int64_t begin) {
      return host_->reduce_scatter(b, combine, within(cuts, begin, b.count));
    });
  }
  Work all_gather(Buffer data, const Cuts& cuts) override {
    return start(collectives, data, true, true, [=, this, cuts = whole(cuts, data)](Buffer b, std::int64_t begin) {
      return host_->all_gather(b, within(cuts, begin, b.count));
    });
  }
  Work barrier() override {
    return start(collectives, {}, false, false, [this](Buffer, std::int64_t) { return host_->barrier(); });
  }
  std::unique_ptr<Communicator> split(int color, int key) override {
    auto part = host_->split(color, key);
    return part ? staged(std::move(part), backend_, options_) : nullptr;
  }

  // The end of a copy sends no notification.
  void rest() override { std::this_thread::sleep_for(std::chrono::microseconds(20)); }
  void wake() override { host_->wake(); }
  Traffic traffic() const override {
    const Traffic host = host_->traffic();
    return {host.bytes, "pinned memory of the host, and " + host.transport};
  }

 private:
  friend class StagedWork;

  static constexpr int collectives = -1;

  Cuts whole(const Cuts& cuts, Buffer data) const { return cuts.empty() ? even_cuts(data.count, size()) : cuts; }
  // The cuts within one chunk.
  static Cuts within(Cuts cuts, std::int64_t begin, std::int64_t count) {
    for (std::int64_t& c : cuts) c = std::clamp<std::int64_t>(c - begin, 0, count);
    return cuts;
  }

  Work start(int lane_number, Buffer data, bool fetches, bool sends, std::function<Work(Buffer, std::int64_t)> call) {
    Lane& lane = lanes_[lane_number];
    if (lane.free.empty() && lane.under_way.empty())
      for (int i = 0; i < options_.chunks; i++)
        lane.free.push_back(
            {.memory = backend_.pinned(options_.chunk_bytes), .event = backend_.new_event(), .work = {}});
    const auto chunk = std::int64_t(options_.chunk_bytes / size_of(data.dtype));
    auto operation = std::make_unique<Operation>(Operation{
        data, std::move(call), fetches, sends, chunk, std::max<std::int64_t>(1, (data.count + chunk - 1) / chunk)});
    lane.queue.push_back(operation.get());
    return Work(std::make_unique<StagedWork>(*this, lane, std::move(operation)));
  }

  static Buffer pinned(const Slot& s) { return {s.memory.get(), s.count, s.operation->data.dtype}; }
  void* on_device(const Slot& s) const { return s.operation->data.at(s.begin); }

  void carry_on() {
    bool any = false, copies = false;
    for (auto& [number, lane] : lanes_)
      while (int(begin_next(lane)) + int(exchange(lane)) + int(land(lane)) > 0) any = true;  // calls all three
    const auto now = Clock::now();
    if (any) moved_ = now;
    for (auto& [number, lane] : lanes_)
      for (const Slot& s : lane.under_way) copies = copies || s.at != Slot::At::host;
    if (!copies) moved_ = now;
    if (std::chrono::duration<double>(now - moved_).count() <= options_.deadline) return;
    const std::string text = where(rank()) + ": a copy between device and host has not ended for " +
                             std::to_string(int(options_.deadline)) + " s";
    group()->fail(rank(), text);
    throw CommunicationError(rank(), text);
  }
  bool begin_next(Lane& lane) {
    if (lane.queue.empty() || lane.free.empty()) return false;
    Operation& o = *lane.queue.front();
    lane.under_way.splice(lane.under_way.end(), lane.free, lane.free.begin());
    Slot& s = lane.under_way.back();
    s.operation = &o;
    s.begin = o.begun++ * o.chunk;
    s.count = std::min(o.data.count - s.begin, o.chunk);
    s.at = Slot::At::device;
    if (o.fetches) {
      down_->fetch(s.memory.get(), on_device(s), pinned(s).bytes());
      down_->mark(*s.event);
    }
    if (o.begun == o.chunks) lane.queue.pop_front();
    return true;
  }
  bool exchange(Lane& lane) {
    for (Slot& s : lane.under_way) {
      if (s.at != Slot::At::device) continue;
      if (s.operation->fetches && !s.event->done()) return false;
      s.work = s.operation->call(pinned(s), s.begin);
      s.at = Slot::At::host;
      return true;
    }
    return false;
  }
  bool land(Lane& lane) {
    bool moved = false;
    for (auto at = lane.under_way.begin(); at != lane.under_way.end();) {
      Slot& s = *at;
      if (s.at == Slot::At::host && s.work.done()) {
        if (s.operation->sends) {
          up_->send(on_device(s), s.memory.get(), pinned(s).bytes());
          up_->mark(*s.event);
        }
        s.at = Slot::At::back;
      }
      auto next = std::next(at);
      if (s.at == Slot::At::back && (!s.operation->sends || s.event->done())) {
        s.operation->ended++;
        lane.free.splice(lane.free.end(), lane.under_way, at);
        moved = true;
      }
      at = next;
    }
    return moved;
  }

  // Drops the operation's chunks in flight, after the device has stopped using their memory.
  void give_up(Lane& lane, Operation& o) {
    std::erase(lane.queue, &o);
    for (auto at = lane.under_way.begin(); at != lane.under_way.end();) {
      auto next = std::next(at);
      if (at->operation == &o) {
        at->work = {};
        while (!at->event->done()) rest();
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

StagedWork::~StagedWork() {
  try {
    if (!operation_->over()) all_.give_up(lane_, *operation_);
  } catch (const Error&) {  // the device has failed: no copies are made
  }
}
bool StagedWork::advance() {
  if (!operation_->over()) all_.carry_on();
  return operation_->over();
}
void StagedWork::wait() {
  while (!advance()) all_.rest();
}

}  // namespace

std::unique_ptr<Communicator> staged(std::shared_ptr<Communicator> host, Backend& backend,
                                     const StagedOptions& options) {
  return std::make_unique<Staged>(std::move(host), backend, options);
}

}  // namespace tandem
