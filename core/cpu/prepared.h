// Weights in the layout of one algorithm. They are kept from the second use of the same state until the weights change.
// Evaluation and gradient accumulation prepare them twice and then reuse them. Training, which changes the weights in
// every step, keeps none: Winograd's filters take four times the memory of the weights. Within a memory budget none are
// kept.
#pragma once
#include <map>
#include <memory>
#include <utility>

#include "core/cpu/pass.h"

namespace tandem::cpu {

class PreparedWeights {
 public:
  explicit PreparedWeights(CachingAllocator& memory) : memory_(memory) {}

  // Calls use(prepared) with the weights in the layout `form` (any number that identifies it), `bytes` long. If there
  // is no current copy, calls prepare(to) first.
  template <class Prepare, class Use>
  void with(WeightKey key, std::uint64_t form, std::size_t bytes, const Prepare& prepare, const Use& use) {
    Entry* e = key.owner ? &entries_[{key.owner, form}] : nullptr;
    const bool again = e && e->seen && e->count == key.count;
    if (again && e->kept) return use(e->kept->data());
    if (e) {
      e->seen = true;
      e->count = key.count;
      e->kept.reset();
    }
    auto block = std::make_unique<Scratch>(memory_, bytes);
    prepare(block->data());
    use(block->data());
    if (again && memory_.statistics().budget == 0) e->kept = std::move(block);
  }

  void forget(const void* owner) {
    auto first = entries_.lower_bound({owner, 0});
    auto last = first;
    while (last != entries_.end() && last->first.first == owner) ++last;
    entries_.erase(first, last);
  }

 private:
  struct Entry {
    std::unique_ptr<Scratch> kept;
    std::uint64_t count = 0;
    bool seen = false;
  };

  CachingAllocator& memory_;
  std::map<std::pair<const void*, std::uint64_t>, Entry> entries_;
};

}  // namespace tandem::cpu
