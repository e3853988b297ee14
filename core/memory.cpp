#include "core/memory.h"

#include <sys/mman.h>

#include <bit>
#include <cstdlib>
#include <new>

#include "core/backend.h"

namespace tandem {
namespace {

// A mebibyte count that reads well in an error: "1.5 MiB".
std::string readable(std::size_t bytes) {
  std::ostringstream out;
  out.precision(3);
  if (bytes >= (1u << 20)) out << double(bytes) / (1 << 20) << " MiB";
  else out << double(bytes) / 1024 << " KiB";
  return out.str();
}

constexpr std::size_t huge_page = std::size_t{2} << 20;

class Heap : public MemorySource {
 public:
  void* acquire(std::size_t bytes) override {
    bool huge = bytes >= huge_page;
    std::size_t alignment = huge ? huge_page : 4096;
    void* block = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    // Fewer page faults and TLB misses on large activations; a hint, so its failure is of no consequence.
    if (block && huge) madvise(block, bytes, MADV_HUGEPAGE);
    return block;
  }
  void release(void* block, std::size_t) override { std::free(block); }
  const char* name() const override { return "host memory"; }
};

}  // namespace

std::unique_ptr<MemorySource> heap_memory() { return std::make_unique<Heap>(); }

// Eight classes per power of two waste at most an eighth; below 4 KiB every request takes one page's worth of class steps.
std::size_t CachingAllocator::size_class(std::size_t bytes) {
  if (bytes <= 512) return 512;
  std::size_t step = std::max<std::size_t>(512, std::bit_floor(bytes - 1) / 8);
  return (bytes + step - 1) / step * step;
}

void* CachingAllocator::take(std::size_t bytes, int stream) {
  std::size_t rounded = size_class(bytes);
  std::lock_guard lock(mutex_);
  statistics_.requests++;
  void* block = nullptr;
  auto list = free_.find({rounded, stream});
  if (list != free_.end() && !list->second.empty()) {
    block = list->second.back();
    list->second.pop_back();
  } else {
    statistics_.source_calls++;
    block = source_->acquire(rounded);
    if (!block) {  // cached blocks of other sizes may be what is in the way
      trim_locked();
      block = source_->acquire(rounded);
    }
    if (!block)
      fail("out of ", source_->name(), ": asked for ", readable(bytes), " while ", readable(statistics_.live_bytes), " in ",
           statistics_.live_blocks, " blocks are in use; a smaller --batch needs less");
    statistics_.reserved_bytes += rounded;
    sizes_[block] = rounded;
  }
  statistics_.live_blocks++;
  statistics_.live_bytes += rounded;
  statistics_.peak_bytes = std::max(statistics_.peak_bytes, statistics_.live_bytes);
  return block;
}

void CachingAllocator::give(void* block, int stream) noexcept {
  if (!block) return;
  std::lock_guard lock(mutex_);
  std::size_t bytes = sizes_.at(block);
  statistics_.live_blocks--;
  statistics_.live_bytes -= bytes;
  free_[{bytes, stream}].push_back(block);
}

void CachingAllocator::trim_locked() {
  for (auto& [key, blocks] : free_) {
    for (void* block : blocks) {
      sizes_.erase(block);
      source_->release(block, key.first);
      statistics_.reserved_bytes -= key.first;
    }
    blocks.clear();
  }
}

void CachingAllocator::trim() {
  std::lock_guard lock(mutex_);
  trim_locked();
}

CachingAllocator::~CachingAllocator() { trim_locked(); }

MemoryStatistics CachingAllocator::statistics() const {
  std::lock_guard lock(mutex_);
  return statistics_;
}

void CachingAllocator::reset_peak() {
  std::lock_guard lock(mutex_);
  statistics_.peak_bytes = statistics_.live_bytes;
}

// ---- storages --------------------------------------------------------------------------------------------------------
Ref<Storage> Storage::create(Backend& backend, std::size_t bytes) {
  return Ref<Storage>(new Storage(backend, backend.memory().take(bytes), bytes, nullptr));
}

Ref<Storage> Storage::wrap(Backend& backend, void* data, std::size_t bytes, std::shared_ptr<void> owner) {
  require(owner != nullptr, "wrapped memory needs an owner that keeps it alive");
  return Ref<Storage>(new Storage(backend, data, bytes, std::move(owner)));
}

Storage::~Storage() {
  for (const auto& segment : segments_) backend_->forget(*segment);
  if (!owner_) backend_->memory().give(data_);
}

void Storage::destroy(const Storage* s) { delete s; }

WriteCount* Storage::add_segment(std::string name) {
  segments_.push_back(std::make_unique<WriteCount>());
  segments_.back()->name = std::move(name);
  return segments_.back().get();
}

// A free list per thread. A storage freed by another thread than its maker simply changes lists.
namespace {
struct FreeStorages {
  struct Link { Link* next; };
  Link* first = nullptr;
  ~FreeStorages() {
    while (first) ::operator delete(std::exchange(first, first->next));
  }
};
thread_local FreeStorages free_storages;
}  // namespace

void* Storage::operator new(std::size_t bytes) {
  if (free_storages.first) return std::exchange(free_storages.first, free_storages.first->next);
  return ::operator new(bytes);
}

void Storage::operator delete(void* p) {
  auto* link = static_cast<FreeStorages::Link*>(p);
  link->next = free_storages.first;
  free_storages.first = link;
}

}  // namespace tandem
