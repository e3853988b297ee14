#include "core/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <new>

#include "core/backend.h"
#include "core/machine.h"
#include "core/text.h"

namespace tandem {
namespace {

constexpr std::size_t huge_page = std::size_t{2} << 20;

class Heap : public MemorySource {
 public:
  void* acquire(std::size_t bytes) override {
    bool huge = bytes >= huge_page;
    std::size_t alignment = huge ? huge_page : 4096;
    void* block = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    // Fewer page faults and TLB misses on large activations; a hint, so an error is ignored.
    if (block && huge) madvise(block, bytes, MADV_HUGEPAGE);
    return block;
  }
  void release(void* block, std::size_t) override { std::free(block); }
  const char* name() const override { return "host memory"; }
  std::size_t left() const override { return available_memory(); }
  std::size_t touched(const void* block, std::size_t bytes) const override {
    static const std::uintptr_t page = std::uintptr_t(sysconf(_SC_PAGESIZE));
    const std::uintptr_t at = reinterpret_cast<std::uintptr_t>(block), begin = at / page * page;
    std::vector<unsigned char> resident((at + bytes - begin + page - 1) / page);
    if (mincore(reinterpret_cast<void*>(begin), at + bytes - begin, resident.data()) != 0) return bytes;
    return std::min<std::size_t>(bytes, page * std::size_t(std::count_if(resident.begin(), resident.end(),
                                                                         [](unsigned char p) { return p & 1; })));
  }
  void discard(void* at, std::size_t bytes) override {
    static const std::uintptr_t page = std::uintptr_t(sysconf(_SC_PAGESIZE));
    const std::uintptr_t begin = (reinterpret_cast<std::uintptr_t>(at) + page - 1) / page * page;
    const std::uintptr_t end = (reinterpret_cast<std::uintptr_t>(at) + bytes) / page * page;
    if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
  }
  // Reserves address space only: a page takes memory when it is first written.
#if defined(__SANITIZE_ADDRESS__)
  // Every block is a segment of its own, so that an overrun is detected
  std::size_t segment_bytes() const override { return 0; }
#else
  std::size_t segment_bytes() const override { return std::size_t{256} << 20; }
#endif
};

// The advice depends on what uses the most memory, including the request that failed. Memory that a step needs in
// addition to the model counts as activations.
std::string remedy(std::array<std::size_t, uses> held, Use asked_for, std::size_t bytes) {
  auto of = [&](Use use) -> std::size_t& { return held[std::size_t(use)]; };
  of(asked_for) += bytes;
  for (Use part : {Use::other, Use::backward, Use::scratch}) of(Use::activations) += std::exchange(of(part), 0);
  switch (static_cast<Use>(std::max_element(held.begin(), held.end()) - held.begin())) {
    case Use::parameters:
    case Use::gradients: return "a smaller --model needs less";
    case Use::optimizer:
      return "a smaller --model, or --optimizer sgd, keeps less; an average (--ema) is as large as the model";
    case Use::data: return "a smaller data set fits; it lies in this memory as a whole";
    default: return "a smaller --batch needs less (--accumulate makes steps of several), and --dtype bf16 half of it";
  }
}

}  // namespace

std::unique_ptr<MemorySource> heap_memory() { return std::make_unique<Heap>(); }

Use& memory_use() {
  static thread_local Use use = Use::other;
  return use;
}

std::uint64_t& memory_requests() {
  static thread_local std::uint64_t requests = 0;
  return requests;
}

const char* name_of(Use use) {
  static constexpr const char* names[uses] = {"other", "parameters",  "gradients", "optimizer state",
                                              "data",  "activations", "backward",  "scratch"};
  return names[int(use)];
}

std::string by_use(const std::array<std::size_t, uses>& bytes) {
  std::vector<int> order;
  for (int i = 0; i < uses; i++)
    if (bytes[std::size_t(i)]) order.push_back(i);
  std::ranges::stable_sort(order, std::greater(), [&](int i) { return bytes[std::size_t(i)]; });
  if (order.empty()) return "nothing";
  return joined(order, ", ", [&](int i) {
    return name_of(static_cast<Use>(i)) + (" " + readable_bytes(double(bytes[std::size_t(i)])));
  });
}

// Eight classes per power of two waste at most an eighth; large blocks are cut to 4 KiB.
std::size_t CachingAllocator::size_class(std::size_t bytes) {
  if (bytes <= 512) return std::max<std::size_t>(32, std::bit_ceil(bytes));
  std::size_t step = bytes >= large ? 4096 : std::max<std::size_t>(512, std::bit_floor(bytes - 1) / 8);
  return (bytes + step - 1) / step * step;
}

void* CachingAllocator::take(std::size_t bytes) {
  std::size_t rounded = size_class(bytes);
  std::unique_lock lock(mutex_);
  statistics_.requests++;
  memory_requests()++;
  if (statistics_.budget && statistics_.live_bytes + rounded > statistics_.budget) make_room(rounded, lock);
  void* block = rounded >= large ? take_large(rounded) : take_small(rounded);
  if (!block) {
    const std::string state = source_->state();
    const std::size_t kept = kept_for_pools(), free = statistics_.reserved_bytes - statistics_.live_bytes - kept;
    fail("out of ", source_->name(), state.empty() ? "" : " (" + state + ")", ": asked for ",
         readable_bytes(double(bytes)), " (", name_of(memory_use()), ") while ",
         readable_bytes(double(statistics_.live_bytes)), " in ", statistics_.live_blocks,
         " blocks are in use: ", by_use(statistics_.live),
         kept ? ", " + readable_bytes(double(kept)) + " is kept for recorded steps, eager work cannot have it" : "",
         free ? ", and " + readable_bytes(double(free)) + " is free in pieces too small" : "", "; ",
         remedy(statistics_.live, memory_use(), rounded));
  }
  statistics_.live_blocks++;
  statistics_.live_bytes += rounded;
  statistics_.live[std::size_t(memory_use())] += rounded;
  if (statistics_.live_bytes > statistics_.peak_bytes) {
    statistics_.peak_bytes = statistics_.live_bytes;
    statistics_.at_peak = statistics_.live;
  }
  peak_since_mark_ = std::max(peak_since_mark_, statistics_.live_bytes - statistics_.data());
  statistics_.peak_of_data = std::max(statistics_.peak_of_data, statistics_.data());
  return block;
}

// Calls the callback, which frees blocks, until the request fits the budget. The lock is released during the call.
void CachingAllocator::make_room(std::size_t bytes, std::unique_lock<std::mutex>& lock) {
  auto needed = [&] { return statistics_.live_bytes + bytes; };
  for (std::pair<std::size_t, std::uint64_t> before{}; relieve_;) {  // repeats if another thread takes the freed memory
    if (before == std::exchange(before, {needed(), statistics_.requests})) break;
    lock.unlock();
    const std::size_t more = relieve_(before.first - statistics_.budget);
    lock.lock();
    if (needed() <= statistics_.budget + more) return;
  }
  refuse("the memory budget of ", readable_bytes(double(statistics_.budget)), " is too small: asked for ",
         readable_bytes(double(bytes)), " (", name_of(memory_use()), ") while ",
         readable_bytes(double(statistics_.live_bytes)), " are in use that cannot leave: ", by_use(statistics_.live),
         "; at least ", readable_bytes(double(needed())), " (", needed(), " bytes) would do so far; ",
         remedy(statistics_.live, memory_use(), bytes));
}

void CachingAllocator::budget(std::size_t bytes, Pressure relieve) {
  std::lock_guard lock(mutex_);
  if (bytes && !statistics_.budget)
    for (const auto& [pool, size, at] : free_large_) source_->discard(at, size);
  if (!bytes) forget_touched(std::size_t(-1), false);
  statistics_.budget = bytes;
  statistics_.peak_of_data = statistics_.data();
  relieve_ = std::move(relieve);
}

std::size_t CachingAllocator::peak_since_mark() {
  std::lock_guard lock(mutex_);
  return std::exchange(peak_since_mark_, statistics_.live_bytes - statistics_.data());
}

// Free bytes in pools that are not in use.
std::size_t CachingAllocator::kept_for_pools() const {
  std::size_t bytes = 0;
  for (const auto& [key, blocks] : free_small_)
    if (key.second && key.second != pool_) bytes += key.first * blocks.size();
  for (const auto& [pool, size, at] : free_large_)
    if (pool && pool != pool_) bytes += size;
  return bytes;
}

// Takes memory from the source. If the source has none, returns free blocks to it and tries again. On a host the source
// never fails; the kernel kills the process when the memory is written. Free memory is therefore returned first when
// too little is left.
void* CachingAllocator::acquire(std::size_t bytes) {
  statistics_.source_calls++;
  if (bytes >= large && source_->left() < bytes) {
    trim_locked();
    for (const auto& [pool, size, at] : free_large_) source_->discard(at, size);
  }
  void* block = source_->acquire(bytes);
  if (!block) {
    trim_locked();
    block = source_->acquire(bytes);
  }
  if (block) statistics_.reserved_bytes += bytes;
  return block;
}

void* CachingAllocator::take_small(std::size_t bytes) {
  auto& free = free_small_[{bytes, pool_}];
  if (free.empty()) {
    constexpr std::size_t cut = std::size_t{8} << 10, slab = std::size_t{64} << 10;
    std::size_t size = bytes <= cut && source_->segment_bytes() > 0 ? slab / bytes * bytes : bytes;
    auto* begin = static_cast<std::byte*>(acquire(size));
    if (!begin && size > bytes) begin = static_cast<std::byte*>(acquire(size = bytes));
    if (!begin) return nullptr;
    slabs_[begin] = {.bytes = size, .block = bytes, .pool = pool_, .use = std::vector<Use>(size / bytes)};
    for (std::size_t at = size; at > 0; at -= bytes) free.push_back(begin + at - bytes);
  }
  void* block = free.back();
  free.pop_back();
  auto slab = slab_of(block);
  slab->second.live++;
  slab->second.use[std::size_t(static_cast<std::byte*>(block) - slab->first) / bytes] = memory_use();
  return block;
}

CachingAllocator::Slabs::iterator CachingAllocator::slab_of(void* block) {
  auto* at = static_cast<std::byte*>(block);
  auto slab = slabs_.upper_bound(at);
  if (slab == slabs_.begin() || at >= (--slab)->first + slab->second.bytes) return slabs_.end();
  return slab;
}

void* CachingAllocator::take_large(std::size_t bytes) {
  const auto from_pool = [&](auto piece) { return piece != free_large_.end() && std::get<0>(*piece) == pool_; };
  auto best = free_large_.lower_bound({pool_, bytes, nullptr});
  if (statistics_.budget) {  // prefer pages that have been written
    auto touched = best;
    while (from_pool(touched) && !pieces_.at(std::get<2>(*touched)).touched) ++touched;
    if (from_pool(touched)) {
      best = touched;
    } else if (const std::size_t pages = statistics_.live_bytes + touched_free_ + bytes; pages > statistics_.budget) {
      forget_touched(pages - statistics_.budget, true);
      best = free_large_.lower_bound({pool_, bytes, nullptr});
    }
  }
  if (!from_pool(best)) {
    std::size_t size = std::max(bytes, source_->segment_bytes());
    auto* segment = static_cast<std::byte*>(acquire(size));
    if (!segment) segment = static_cast<std::byte*>(acquire(size = bytes));
    if (!segment) return nullptr;
    segments_[segment] = size;
    pieces_[segment] = {size, segment, pool_, true, Use::other};
    best = free_large_.insert({pool_, size, segment}).first;
  }
  auto piece = pieces_.find(std::get<2>(*best));
  free_large_.erase(best);
  piece->second.free = false;
  piece->second.use = memory_use();
  const bool touched = std::exchange(piece->second.touched, false);
  if (touched) touched_free_ -= bytes;
  if (std::size_t rest = piece->second.bytes - bytes; rest > 0) {
    piece->second.bytes = bytes;
    std::byte* behind = piece->first + bytes;
    pieces_[behind] = {rest, piece->second.segment, pool_, true, Use::other, touched};
    free_large_.insert({pool_, rest, behind});
  }
  return piece->first;
}

void CachingAllocator::give(void* block) noexcept {
  if (!block) return;
  std::lock_guard lock(mutex_);
  std::size_t bytes = 0;
  Use use = Use::other;
  if (auto at = slab_of(block); at != slabs_.end()) {
    Slab& slab = at->second;
    bytes = slab.block;
    use = slab.use[std::size_t(static_cast<std::byte*>(block) - at->first) / bytes];
    slab.live--;
    free_small_[{bytes, slab.pool}].push_back(block);
  } else {
    auto piece = pieces_.find(static_cast<std::byte*>(block));
    bytes = piece->second.bytes;
    use = piece->second.use;
    if (statistics_.budget) {
      piece->second.touched = true;
      touched_free_ += bytes;
    }
    give_large(piece);
  }
  statistics_.live_blocks--;
  statistics_.live_bytes -= bytes;
  statistics_.live[std::size_t(use)] -= bytes;
}

// Joins the free neighbours of its segment.
void CachingAllocator::give_large(Pieces::iterator piece) {
  auto joins = [&](Pieces::iterator a, Pieces::iterator b) {
    return a->second.segment == b->second.segment && a->second.pool == b->second.pool &&
           a->second.touched == b->second.touched;
  };
  if (auto next = std::next(piece); next != pieces_.end() && next->second.free && joins(piece, next)) {
    free_large_.erase({next->second.pool, next->second.bytes, next->first});
    piece->second.bytes += next->second.bytes;
    pieces_.erase(next);
  }
  if (piece != pieces_.begin()) {
    if (auto before = std::prev(piece); before->second.free && joins(before, piece)) {
      free_large_.erase({before->second.pool, before->second.bytes, before->first});
      before->second.bytes += piece->second.bytes;
      pieces_.erase(piece);
      piece = before;
    }
  }
  piece->second.free = true;
  free_large_.insert({piece->second.pool, piece->second.bytes, piece->first});
}

// Clears the mark `touched` of free pieces of this many bytes in total. discard: their pages are returned to the system
// first.
void CachingAllocator::forget_touched(std::size_t bytes, bool discard) {
  std::vector<std::byte*> places;
  for (std::size_t found = 0; const auto& [pool, size, at] : free_large_)
    if (pieces_.at(at).touched && found < bytes) {
      places.push_back(at);
      found += size;
    }
  for (std::byte* at : places) {
    auto piece = pieces_.find(at);
    free_large_.erase({piece->second.pool, piece->second.bytes, at});
    if (discard) source_->discard(at, piece->second.bytes);
    touched_free_ -= piece->second.bytes;
    piece->second.touched = false;
    give_large(piece);  // joins neighbours that are equal now
  }
}

void CachingAllocator::trim_locked() {
  for (auto& [key, blocks] : free_small_)
    if (key.second == 0)  // not a pool's
      std::erase_if(blocks, [&](void* block) { return slab_of(block)->second.live == 0; });
  auto release = [&](std::byte* block, std::size_t bytes) {
    source_->release(block, bytes);
    statistics_.reserved_bytes -= bytes;
    return true;
  };
  std::erase_if(slabs_, [&](auto& one) {
    const auto& [begin, slab] = one;
    return !slab.pool && slab.live == 0 && release(begin, slab.bytes);
  });
  std::erase_if(segments_, [&](auto& segment) {
    auto piece = pieces_.find(segment.first);
    if (!piece->second.free || piece->second.bytes != segment.second || piece->second.pool) return false;
    free_large_.erase({piece->second.pool, piece->second.bytes, piece->first});
    if (piece->second.touched) touched_free_ -= piece->second.bytes;
    pieces_.erase(piece);
    return release(segment.first, segment.second);
  });
}

void CachingAllocator::trim() {
  std::lock_guard lock(mutex_);
  trim_locked();
}

void CachingAllocator::use_pool(int pool) {
  std::lock_guard lock(mutex_);
  require(pool == 0 || pool_ == 0, "memory: pool ", pool_, " is in use, pool ", pool, " cannot be");
  pool_ = pool;
}

void CachingAllocator::release_pool(int pool) {
  if (pool == 0) return;
  std::lock_guard lock(mutex_);
  for (auto& [begin, slab] : slabs_)
    if (slab.pool == pool) slab.pool = 0;
  for (auto& [key, blocks] : free_small_) {
    if (key.second != pool) continue;
    auto& ordinary = free_small_[{key.first, 0}];  // std::map: the loop's iterator stays valid
    ordinary.insert(ordinary.end(), blocks.begin(), blocks.end());
    blocks.clear();
  }
  for (auto& [at, piece] : pieces_) {
    if (piece.pool != pool) continue;
    if (piece.free) {
      free_large_.erase({pool, piece.bytes, at});
      free_large_.insert({0, piece.bytes, at});
    }
    piece.pool = 0;
  }
}

CachingAllocator::~CachingAllocator() {
  for (int pool = 1; pool <= pools_; pool++) release_pool(pool);
  trim_locked();
}

MemoryStatistics CachingAllocator::statistics() const {
  std::lock_guard lock(mutex_);
  return statistics_;
}

void CachingAllocator::reset_peak() {
  std::lock_guard lock(mutex_);
  statistics_.peak_bytes = statistics_.live_bytes;
  statistics_.at_peak = statistics_.live;
}

std::size_t CachingAllocator::left() const {
  const std::size_t left = source_->left();
  if (left == std::size_t(-1)) return left;
  std::lock_guard lock(mutex_);
  std::size_t free = statistics_.reserved_bytes - statistics_.live_bytes;
  for (const auto& [pool, bytes, at] : free_large_) free -= bytes - source_->touched(at, bytes);
  return left + free;
}

Backend& CachingAllocator::backend_is_gone() const {
  fail("a tensor in ", source_->name(),
       " outlived its backend: keep the backend until its tensors are gone, or take their ", "values() before");
}

// ---- storages -------------------------------------------------------------------------------------------------------
Ref<Storage> Storage::create(Backend& backend, std::size_t bytes) {
  CachingAllocator& memory = backend.memory();
  return Ref<Storage>(new Storage(&memory, memory.take(bytes), bytes));
}

Ref<Storage> Storage::wrap(Backend& backend, void* data, std::size_t bytes, std::shared_ptr<void> owner) {
  require(owner != nullptr, "wrapped memory needs an owner that keeps it alive");
  Ref<Storage> storage(new Storage(&backend.memory(), data, bytes));
  storage->rare().owner = std::move(owner);
  return storage;
}

Storage::~Storage() {
  if (Keeper* k = keeper()) k->gone(*this);
  if (Backend* backend = memory_->living_backend())
    for (const auto& segment : segments()) backend->forget(*segment);
  if (!rare_ || !rare_->owner) memory_->give(data_);
}

void Storage::destroy(const Storage* s) { delete s; }

void Storage::require_resident() const {
  if (residency() == Residency::resident) return;  // wrapped memory of zero bytes
  if (Keeper* k = keeper()) k->bring_back(const_cast<Storage&>(*this));
  require(data_ != nullptr, "a tensor of ", readable_bytes(double(bytes_)), " was read whose bytes were ",
          residency() == Residency::evicted ? "swapped out" : "discarded, to be computed again",
          ", and its memory plan is gone: read it while the plan exists");
}

void Storage::leave(Residency as) {
  require(movable() && keeper() && data_, "a storage of ", readable_bytes(double(bytes_)), " cannot leave its memory");
  memory_->give(std::exchange(data_, nullptr));
  rare_->residency = as;
}

void* Storage::new_block() {
  MemoryUse use(Use::activations);
  return memory_->take(bytes_);
}

void Storage::give_back(void* block) { memory_->give(block); }

void Storage::arrive(void* block) {
  data_ = block;
  rare_->residency = Residency::resident;
}

void Storage::adopt(Storage& other) {
  require(!data_ && other.bytes_ == bytes_ && other.references() == 1 && other.movable() && other.data_,
          "a storage of ", readable_bytes(double(bytes_)), " cannot adopt another's block");
  arrive(std::exchange(other.data_, nullptr));
}

std::span<const std::unique_ptr<WriteCount>> Storage::segments() const {
  return rare_ ? std::span<const std::unique_ptr<WriteCount>>(rare_->segments)
               : std::span<const std::unique_ptr<WriteCount>>();
}

WriteCount* Storage::add_segment(std::string name) {
  auto& segments = rare().segments;
  segments.push_back(std::make_unique<WriteCount>());
  segments.back()->name_of_segment = std::make_unique<const std::string>(std::move(name));
  return segments.back().get();
}

}  // namespace tandem
