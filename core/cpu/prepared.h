// Weights in the layout of one algorithm. They are kept from the second use of the same state until the weights change.
// Evaluation and gradient accumulation prepare them twice and then reuse them. Training, which changes the weights in
// every step, keeps none: Winograd's filters take four times the memory of the weights. Within a memory budget none are
// kept.
#pragma once
#include <map>
#include <memory>
#include <utility>

#include "core/cpu/scratch.h"

namespace tandem::cpu {

class PreparedWeights {
 public:
  explicit PreparedWeights(Scratch& scratch) : scratch_(scratch) {}

  // The prepared form `form` (any number that tells layouts apart) of the weights, `bytes` long: calls prepare(to) when
  // it is not there or stale, then use(prepared).
  template <class Prepare, class Use>
  void with(WeightKey key, std::uint64_t form, std::size_t bytes, const Prepare& prepare, const Use& use) {
    if (!key.owner) {
      Block once(scratch_, bytes);
      prepare(once.data());
      return use(once.data());
    }
    Entry& e = entries_[{key.owner, form}];
    if (e.block && e.count == key.count) return use(e.block->data());
    const bool again = e.seen && e.count == key.count && scratch_.may_keep();
    e.seen = true;
    e.count = key.count;
    e.block.reset();
    if (again) {
      e.block = std::make_unique<Block>(scratch_, bytes);
      prepare(e.block->data());
      return use(e.block->data());
    }
    Block once(scratch_, bytes);
    prepare(once.data());
    use(once.data());
  }

  void forget(const void* owner) {
    auto first = entries_.lower_bound({owner, 0});
    auto last = first;
    while (last != entries_.end() && last->first.first == owner) ++last;
    entries_.erase(first, last);
  }

 private:
  struct Entry {
    std::unique_ptr<Block> block;
    std::uint64_t count = 0;
    bool seen = false;
  };

  Scratch& scratch_;
  std::map<std::pair<const void*, std::uint64_t>, Entry> entries_;
};

}  // namespace tandem::cpu
