// A device for tests without one: a twin of the reference backend.
//
// It records as a GPU does. While it records, nothing that is computed stays (a graph only writes it down: the twin
// puts all memory back as it was), and nothing may be read or sent; a replay does the work again.
//
// With `behind`, it runs behind the host's back: who copies from it beside its queue sees its memory as it was at the
// last place in the queue that the host has asked for and found done, and the work of its queues goes on only when an
// event is asked. Who does not wait for the right event gets old numbers.
#pragma once
#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>

#include "core/recording.h"
#include "core/reference/backend.h"

namespace tandem::test {

// Every block its own, and all of them known.
class Listed : public MemorySource {
 public:
  std::map<std::byte*, std::size_t>& blocks;
  explicit Listed(std::map<std::byte*, std::size_t>& b) : blocks(b) {}
  void* acquire(std::size_t bytes) override {
    auto* p = static_cast<std::byte*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
    std::memset(p, 0, bytes);
    blocks[p] = bytes;
    return p;
  }
  void release(void* p, std::size_t) override {
    blocks.erase(static_cast<std::byte*>(p));
    std::free(p);
  }
  const char* name() const override { return "the twin's memory"; }
  std::size_t segment_bytes() const override { return 0; }
};

struct Blocks {  // a base, so that it outlives the allocator
  std::map<std::byte*, std::size_t> blocks;
};

class Twin;

// Work that is carried out one piece at a time, when an event is asked.
class TwinQueue : public Queue {
 public:
  explicit TwinQueue(Twin& twin) : twin_(twin) {}
  void mark(Event& event) override;
  void wait(Event& event) override;
  void fetch(void* pinned, const void* device, std::size_t bytes) override;
  void send(void* device, const void* pinned, std::size_t bytes) override;
  void* handle() override { return this; }
  Twin& twin() { return twin_; }

  void add(std::function<bool()> work) {  // true: it is done
    std::lock_guard lock(mutex_);
    work_.push_back(std::move(work));
  }
  bool step();
  bool next() {
    std::lock_guard lock(mutex_);
    if (work_.empty() || !work_.front()()) return false;
    work_.pop_front();
    return true;
  }
  void drain() {
    while (next()) {}
  }

 private:
  friend class Twin;
  Twin& twin_;
  std::mutex mutex_;
  std::deque<std::function<bool()>> work_;
};

struct TwinEvent : Event {
  std::atomic<TwinQueue*> queue{nullptr};
  std::atomic<std::uint64_t> marks{0}, reached{0};  // reached never passes marks, and is read first
  bool done() override {
    if (TwinQueue* q = queue) q->step();
    const std::uint64_t before = reached;
    return before == marks;
  }
};

class Twin : private Blocks, public reference::ReferenceBackend {
 public:
  using Memory = std::map<std::byte*, std::vector<std::byte>>;
  std::string log;  // s: the step was called, […]: while recording, r: a replay
  bool refuses = false, behind = false;
  std::atomic<bool> stuck{false};  // no queue goes on any more
  std::string uuid;                // identity()
  std::atomic<std::size_t> bytes_to_host{0};

  Twin() : ReferenceBackend(1, std::make_unique<Listed>(blocks)) { deterministic(true); }
  bool records() const override { return true; }
  bool recording() const override { return recording_; }
  std::function<void()> record(std::function<void()> step) override {
    auto logged = [this, step] {
      if (!replaying_) log += 's';
      step();
    };
    auto recording = std::make_shared<Recording>(logged, std::make_unique<Snapshot>(*this, logged));
    return [recording] { (*recording)(); };
  }
  void upload(void* to, const void* from, std::size_t bytes) override {
    if (recording_) throw NotRecordable("sent from the host");
    ReferenceBackend::upload(to, from, bytes);
  }
  void download(void* to, const void* from, std::size_t bytes) override {
    if (recording_ || replaying_) throw NotRecordable("read on the host");
    if (behind) synchronize();
    bytes_to_host += bytes;
    ReferenceBackend::download(to, from, bytes);
  }
  void synchronize() override {
    in_order_.drain();
    if (behind) seen(copy_of_all());
  }

  bool asynchronous() const override { return behind; }
  Queue& queue() override { return in_order_; }
  std::unique_ptr<Queue> new_queue() override { return std::make_unique<TwinQueue>(*this); }
  std::unique_ptr<Event> new_event() override { return std::make_unique<TwinEvent>(); }
  std::string identity() const override { return uuid; }

  // As a queue beside the queue sees it.
  void read(void* to, const void* from, std::size_t bytes) {
    std::lock_guard lock(mutex_);
    const std::byte* at = place(seen_, from);
    std::memcpy(to, at ? at : from, bytes);
  }
  void write(void* to, const void* from, std::size_t bytes) {
    std::lock_guard lock(mutex_);
    for (Memory* also : {&seen_, before_})
      if (std::byte* at = also ? place(*also, to) : nullptr) std::memcpy(at, from, bytes);
    std::memcpy(to, from, bytes);
  }

 private:
  friend class TwinQueue;
  struct Snapshot : Capture {
    Twin& t;
    std::function<void()> step;
    int pool;
    Memory before;
    Snapshot(Twin& twin, std::function<void()> s) : t(twin), step(std::move(s)), pool(twin.memory().new_pool()) {}
    ~Snapshot() override { t.memory().release_pool(pool); }
    void begin() override {
      t.log += '[';
      {
        std::lock_guard lock(t.mutex_);
        before = t.copy_of_all();
        t.before_ = &before;
      }
      t.memory().use_pool(pool);
      t.recording_ = true;
    }
    std::string end() override {
      t.recording_ = false;
      t.memory().use_pool(0);
      std::lock_guard lock(t.mutex_);
      t.before_ = nullptr;
      for (auto& [p, bytes] : before)
        if (t.blocks.count(p)) std::memcpy(p, bytes.data(), bytes.size());
      before.clear();
      t.log += ']';
      return t.refuses ? "the twin refuses" : "";
    }
    void replay() override {
      t.log += 'r';
      t.replaying_ = true;
      step();
      t.replaying_ = false;
    }
  };

  Memory copy_of_all() const {
    Memory copy;
    for (const auto& [p, n] : blocks) copy[p].assign(p, p + n);
    return copy;
  }
  void seen(Memory now) {
    std::lock_guard lock(mutex_);
    seen_ = std::move(now);
  }
  static std::byte* place(Memory& memory, const void* p) {
    auto at = memory.upper_bound(static_cast<std::byte*>(const_cast<void*>(p)));
    if (at == memory.begin()) return nullptr;
    --at;
    const auto offset = static_cast<const std::byte*>(p) - at->first;
    return std::size_t(offset) < at->second.size() ? at->second.data() + offset : nullptr;
  }

  bool recording_ = false, replaying_ = false;
  std::mutex mutex_;
  Memory seen_;
  Memory* before_ = nullptr;  // while recording: what comes back, and what other queues have written meanwhile
  TwinQueue in_order_{*this};
};

struct AsynchronousTwin : Twin {
  AsynchronousTwin() { behind = true; }
};

inline bool TwinQueue::step() { return !twin_.stuck && next(); }
inline void TwinQueue::mark(Event& event) {
  if (this == &twin_.in_order_ && twin_.recording_) return;
  auto& e = dynamic_cast<TwinEvent&>(event);
  e.queue = this;
  const std::uint64_t mark = ++e.marks;
  const bool own = this == &twin_.in_order_ && twin_.behind;
  add([this, &e, mark, own, memory = own ? twin_.copy_of_all() : Twin::Memory()]() mutable {
    if (own) twin_.seen(std::move(memory));
    e.reached = mark;
    return true;
  });
}
// What the backend computes is computed at once, so its queue waits at once, too.
inline void TwinQueue::wait(Event& event) {
  if (this != &twin_.in_order_) return add([&event] { return event.done(); });
  while (!twin_.stuck && !event.done()) {}
}
inline void TwinQueue::fetch(void* pinned, const void* device, std::size_t bytes) {
  if (this == &twin_.in_order_ && twin_.recording_) return;
  twin_.bytes_to_host += bytes;
  if (this != &twin_.in_order_) {
    add([=, this] { return twin_.read(pinned, device, bytes), true; });
  } else {  // what is there now: the twin has computed it
    const auto* p = static_cast<const std::byte*>(device);
    add([pinned, now = std::vector<std::byte>(p, p + bytes)] {
      std::memcpy(pinned, now.data(), now.size());
      return true;
    });
  }
}
inline void TwinQueue::send(void* device, const void* pinned, std::size_t bytes) {
  add([=, this] { return twin_.write(device, pinned, bytes), true; });
}

// A twin on which a block that is asked for takes a millisecond.
struct Clocked : Twin {
  struct Marks : Follower {
    CachingAllocator& memory;
    std::vector<std::int64_t> marks;
    int open = 0;  // ranges that have begun and not ended
    explicit Marks(CachingAllocator& m) : memory(m) {}
    virtual std::int64_t time() const { return 1000000 * std::int64_t(memory.statistics().requests); }
    void enter(const char*) override { open++; }
    void leave() override { open--; }
    void passed(const char*) override {}
    std::int64_t mark() override {
      marks.push_back(time());
      return std::int64_t(marks.size()) - 1;
    }
    std::vector<std::int64_t> times(const std::function<std::int64_t()>&) override { return std::exchange(marks, {}); }
  };
  std::unique_ptr<Follower> follower() override { return std::make_unique<Marks>(memory()); }
};

}  // namespace tandem::test
