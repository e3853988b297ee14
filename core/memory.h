// Memory: reference counts, the caching allocator, and storages that count their writes.
//
// After the first two training steps no memory is requested from the system: freed blocks are kept in lists by size
// class and are reused. All backends use this allocator; a backend only supplies a MemorySource.
#pragma once
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <memory_resource>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/restored.h"

namespace tandem {

class Backend;

// ---- reference counts -----------------------------------------------------------------------------------------------
// The count is intrusive, so a handle is one pointer, and unique() tells whether a buffer may be overwritten in place.
class Counted {
 public:
  Counted() = default;
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;
  void retain() const { references_.fetch_add(1, std::memory_order_relaxed); }
  // Returns true if this was the last reference.
  bool drop() const { return references_.fetch_sub(1, std::memory_order_acq_rel) == 1; }
  int references() const { return references_.load(std::memory_order_acquire); }

 private:
  mutable std::atomic<int> references_{0};
};

// A counted pointer. T supplies `static void destroy(const T*)`.
template <class T>
class Ref {
 public:
  Ref() = default;
  Ref(T* p) : p_(p) {
    if (p_) p_->retain();
  }
  Ref(const Ref& o) : Ref(o.p_) {}
  Ref(Ref&& o) noexcept : p_(std::exchange(o.p_, nullptr)) {}
  template <class U>
  Ref(const Ref<U>& o) : Ref(static_cast<T*>(o.pointer())) {}
  ~Ref() { reset(); }
  Ref& operator=(Ref o) noexcept {
    std::swap(p_, o.p_);
    return *this;
  }
  void reset() {
    if (T* p = std::exchange(p_, nullptr); p && p->drop()) T::destroy(p);
  }
  T* pointer() const { return p_; }
  T* operator->() const { return p_; }
  T& operator*() const { return *p_; }
  explicit operator bool() const { return p_ != nullptr; }
  bool unique() const { return p_ && p_->references() == 1; }

 private:
  T* p_ = nullptr;
};

// ---- the caching allocator ------------------------------------------------------------------------------------------
// The source of memory blocks: the heap, cudaMalloc, pinned or shared memory. acquire returns null when none is left.
class MemorySource {
 public:
  virtual ~MemorySource() = default;
  virtual void* acquire(std::size_t bytes) = 0;
  virtual void release(void* block, std::size_t bytes) = 0;
  virtual const char* name() const = 0;
  // Large blocks are cut from segments of this size
  virtual std::size_t segment_bytes() const { return std::size_t{64} << 20; }
  // The free memory and the use of the rest, for the out-of-memory message: "0.4 GiB of 80 GiB are free".
  // Empty: unknown.
  virtual std::string state() const { return {}; }
  // An estimate of the bytes that acquire can still return; −1: unknown
  virtual std::size_t left() const { return std::size_t(-1); }
  // Returns the physical pages of this part of a block to the system. The contents are lost; a write takes new pages.
  virtual void discard(void* at, std::size_t bytes) { (void)at, (void)bytes; }
  // The bytes of a block that take physical memory. The rest is address space that has not been written to; left()
  // still counts it.
  virtual std::size_t touched(const void* block, std::size_t bytes) const { return (void)block, bytes; }
};

// The purpose of a block. Code that allocates declares it with MemoryUse. The allocator counts the bytes of each use,
// for the out-of-memory message.
enum class Use : std::uint8_t { other, parameters, gradients, optimizer, data, activations, backward, scratch };
inline constexpr int uses = 8;
const char* name_of(Use use);  // "optimizer state"

Use& memory_use();                 // the purpose of this thread's requests
std::uint64_t& memory_requests();  // the number of requests that this thread has made
struct MemoryUse : Restored<Use> {
  explicit MemoryUse(Use use) : Restored(memory_use(), use) {}
};

struct MemoryStatistics {
  std::size_t live_bytes = 0, peak_bytes = 0;  // handed out now; the maximum so far
  std::size_t reserved_bytes = 0;              // obtained from the source and not yet returned
  std::uint64_t live_blocks = 0;
  std::uint64_t requests = 0, source_calls = 0;     // in a steady state source_calls does not change
  std::array<std::size_t, uses> live{}, at_peak{};  // bytes by Use: now, and when peak_bytes was reached
  std::size_t budget = 0, peak_of_data = 0;         // 0: no limit; the maximum of Use::data since the budget was set
  std::size_t data() const { return live[std::size_t(Use::data)]; }
};

// "activations 310 MiB, parameters 1.04 MiB, …", the largest first, without zeros.
std::string by_use(const std::array<std::size_t, uses>& bytes);

// Small requests (below 1 MiB) are rounded up to 32, 64, … 512 bytes, or to one of eight sizes per power of two. A
// small block that is given back is put in a free list of its size. Blocks of up to 8 KiB are cut from slabs of 64 KiB,
// so that a scalar costs 32 bytes. Large blocks are cut from segments, best fit. A free large block is merged with its
// free neighbours: late in the backward pass the many small activations of the last layers become room for the few
// large gradients of the first.
//
// Thread-safe. A block given back may be taken again at once: a device works in the order of the calls. Throws Error
// when the source is exhausted; the message has the size of the request and the memory held by each use.
//
// A pool is for a recorded step, whose replays use the addresses of the recording. A block that is taken while a pool
// is in use comes from the pool's own memory and returns to it. So no other code gets this memory, and trim() does not
// return it.
//
// A budget limits the bytes that are handed out and, for large blocks, the physical pages that they take: free blocks
// return their pages before pages of new blocks are touched. When a request would exceed the budget, the pressure
// callback is called to give memory back. A request that still does not fit throws Error, which names the smallest
// budget that would have sufficed.
//
// A storage shares the ownership of the allocator that its memory is from, so a tensor may outlive its backend: its
// elements remain valid, and any operation that needs the backend throws Error.
class CachingAllocator : public Counted {
 public:
  static constexpr std::size_t large = std::size_t{1} << 20;
  explicit CachingAllocator(std::unique_ptr<MemorySource> source, Backend* backend = nullptr)
      : source_(std::move(source)), backend_(backend) {}
  ~CachingAllocator();
  static void destroy(const CachingAllocator* a) { delete a; }
  Backend& backend() const { return backend_ ? *backend_ : backend_is_gone(); }
  Backend* living_backend() const { return backend_; }
  void backend_ends() { backend_ = nullptr; }
  void* take(std::size_t bytes);  // aligned to 64 bytes, or to a smaller block's size
  void give(void* block) noexcept;
  void trim();  // returns segments and slabs that are completely free to the source, except those of pools
  int new_pool() { return ++pools_; }
  void use_pool(int pool);      // for all requests from now on; 0: none. Throws when a pool is in use already
  void release_pool(int pool);  // makes its memory ordinary; blocks in use become ordinary when they are given back
  const char* name() const { return source_->name(); }
  MemoryStatistics statistics() const;
  // Limits live_bytes; 0: no limit. When a request is `bytes` too large, `relieve(bytes)` is called on the requesting
  // thread, without the lock: it gives back memory where it can (give(), Storage::leave()) and returns by how many
  // bytes this request may exceed the budget.
  using Pressure = std::function<std::size_t(std::size_t bytes)>;
  void budget(std::size_t bytes, Pressure relieve = {});
  // The maximum of the bytes handed out since its last call, without Use::data, which other threads (a loader) take and
  // give back. One caller at a time.
  std::size_t peak_since_mark();
  std::size_t left() const;  // an estimate of the bytes that may still be taken, here and from the source; −1: unknown
  void reset_peak();
  static std::size_t size_class(std::size_t bytes);  // the size that a request is rounded up to

 private:
  struct Piece {  // a part of a segment; the pieces of one segment are consecutive in pieces_
    std::size_t bytes;
    std::byte* segment;
    int pool;  // 0: none
    bool free;
    Use use = Use::other;
    // The piece is free, and its pages may have been written to since they were given back; only known under a budget
    bool touched = false;
  };
  using Pieces = std::pmr::map<std::byte*, Piece>;
  using Order = std::tuple<int, std::size_t, std::byte*>;  // pool, size, place

  struct Slab {  // memory from the source, cut into small blocks of one size
    std::size_t bytes = 0, block = 0;
    int pool = 0;
    std::vector<Use> use = {};  // the purpose of each block
    std::size_t live = 0;       // blocks that are handed out
  };
  using Slabs = std::map<std::byte*, Slab>;

  void make_room(std::size_t bytes, std::unique_lock<std::mutex>& lock);
  void* take_small(std::size_t bytes);
  Slabs::iterator slab_of(void* block);  // end: it is a large block
  void* take_large(std::size_t bytes);
  void give_large(Pieces::iterator piece);
  void forget_touched(std::size_t bytes, bool discard);
  void* acquire(std::size_t bytes);
  void trim_locked();
  std::size_t kept_for_pools() const;
  [[noreturn]] Backend& backend_is_gone() const;

  std::unique_ptr<MemorySource> source_;
  Backend* backend_;  // null after it was destroyed
  mutable std::mutex mutex_;
  std::pmr::unsynchronized_pool_resource bookkeeping_;  // reuses the nodes below: no malloc in a steady state
  std::map<std::pair<std::size_t, int>, std::vector<void*>> free_small_;  // by size and pool
  Slabs slabs_;
  Pieces pieces_{&bookkeeping_};
  std::pmr::set<Order> free_large_{&bookkeeping_};
  std::unordered_map<std::byte*, std::size_t> segments_;
  int pool_ = 0, pools_ = 0;  // the pool in use; number of pools made so far
  std::size_t peak_since_mark_ = 0, touched_free_ = 0;
  Pressure relieve_;
  MemoryStatistics statistics_;
};

std::unique_ptr<MemorySource> heap_memory();  // aligned host memory, huge pages where they help

// Memory for the length of a scope. On a device it may be given back while a kernel still uses it, since work is in
// order. carve() cuts it, front to back, into pieces aligned to 64 bytes.
class Scratch {
 public:
  Scratch(CachingAllocator& memory, std::size_t bytes) : memory_(memory) {
    MemoryUse use(Use::scratch);
    if (bytes) data_ = static_cast<std::byte*>(memory.take(bytes + 64));  // 64: aligns the second of two pieces
  }
  ~Scratch() { memory_.give(data_); }
  Scratch(const Scratch&) = delete;
  std::byte* data() const { return data_; }
  template <class T>
  T* carve(std::size_t count) {
    T* piece = reinterpret_cast<T*>(data_ + used_);
    used_ += (count * sizeof(T) + 63) / 64 * 64;
    return piece;
  }

 private:
  CachingAllocator& memory_;
  std::byte* data_ = nullptr;
  std::size_t used_ = 0;
};

// ---- storages -------------------------------------------------------------------------------------------------------
// Counts the writes to a storage or to a segment of a storage. A tensor saved for backward stores the count, and
// reading it throws if the count has changed. Prepared weights compare the count to detect that they are stale. Each
// count begins at a different number, so that no two tensors ever have the same count, even when a tensor is created at
// the address of a destroyed one. Written by one thread at a time.
struct WriteCount {
  std::atomic<std::uint64_t> writes{first()};
  std::unique_ptr<const std::string> name_of_segment;
  // "conv1.weight" for a parameter; empty for an activation
  std::string name() const { return name_of_segment ? *name_of_segment : std::string(); }
  void bump() { writes.store(writes.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed); }
  std::uint64_t now() const { return writes.load(std::memory_order_relaxed); }
  static std::uint64_t first() {
    static std::atomic<std::uint64_t> next{0};
    return next.fetch_add(std::uint64_t{1} << 32, std::memory_order_relaxed);
  }
};

class Storage;

// Where a storage's bytes are: in its block, in a mover's copy, or nowhere (they can be recomputed).
enum class Residency : std::uint8_t { resident, evicted, discarded };

// The interface of an object that evicts storages and brings them back: the memory plan (autograd/memory_plan.h).
class Keeper {
 public:
  virtual ~Keeper() = default;
  virtual void bring_back(Storage& storage) = 0;     // makes it resident, or throws; on the thread that reads
  virtual void gone(Storage& storage) noexcept = 0;  // the storage is destroyed; on the thread that dropped it
};

// A storage whose bytes its keeper has evicted has no block. A read of the storage calls the keeper, which brings the
// bytes back, possibly to another address. Only memory of the allocator can be evicted, and not that of parameters,
// since other objects hold pointers into their segments.
class Storage : public Counted {
 public:
  // Takes memory from the backend's allocator, or (second form) wraps memory that `owner` keeps alive.
  static Ref<Storage> create(Backend& backend, std::size_t bytes);
  static Ref<Storage> wrap(Backend& backend, void* data, std::size_t bytes, std::shared_ptr<void> owner);
  static void destroy(const Storage*);

  Backend& backend() const { return memory_->backend(); }  // throws Error when it was destroyed
  std::byte* data() const {
    if (!data_) [[unlikely]]
      require_resident();
    return static_cast<std::byte*>(data_);
  }
  std::size_t bytes() const { return bytes_; }
  std::size_t block_bytes() const { return CachingAllocator::size_class(bytes_); }

  Residency residency() const { return rare_ ? rare_->residency : Residency::resident; }
  bool movable() const { return !rare_ || (!rare_->owner && rare_->segments.empty()); }
  void keep(Keeper* keeper, int id) {  // null: no keeper
    rare().keeper = keeper;
    rare().kept_as = id;
  }
  Keeper* keeper() const { return rare_ ? rare_->keeper : nullptr; }
  int kept_as() const { return rare_ ? rare_->kept_as : 0; }  // the keeper's number for it
  void leave(Residency as);                                   // gives its block back
  void* new_block();                                          // allocates a block for its return
  void give_back(void* block);                                // gives back a block of new_block() that was not used
  void arrive(void* block);                                   // the block holds its bytes: it is resident
  void adopt(Storage& other);  // takes over the block of `other`, which has the same size and no other reference
  // Counts the references from tapes. If all references are from tapes, no operation reads the storage before backward.
  void on_tape(int change) { on_tape_.fetch_add(change, std::memory_order_relaxed); }
  bool only_on_tape() const { return references() == on_tape_.load(std::memory_order_relaxed); }
  WriteCount* whole() { return &whole_; }
  std::span<const std::unique_ptr<WriteCount>> segments() const;
  WriteCount* add_segment(std::string name);  // valid as long as the storage exists

 private:
  Storage(Ref<CachingAllocator> memory, void* data, std::size_t bytes)
      : memory_(std::move(memory)), data_(data), bytes_(bytes) {}
  ~Storage();
  struct Rare {                   // members that few storages need
    std::shared_ptr<void> owner;  // set: the memory is not from the allocator
    std::vector<std::unique_ptr<WriteCount>> segments;
    Keeper* keeper = nullptr;
    int kept_as = 0;
    Residency residency = Residency::resident;
  };
  void require_resident() const;
  Rare& rare() { return *(rare_ ? rare_ : (rare_ = std::make_unique<Rare>())); }
  std::atomic<int> on_tape_{0};
  Ref<CachingAllocator> memory_;
  void* data_;  // null: not resident
  std::size_t bytes_;
  WriteCount whole_;
  std::unique_ptr<Rare> rare_;
};

}  // namespace tandem
