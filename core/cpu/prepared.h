// Weights laid out for one algorithm, kept until the weights change. Training prepares them anew in each step, in the
// same memory; evaluation prepares them once.
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
    if (!e.block || e.bytes != bytes) {
      e.block.reset();
      e.block = std::make_unique<Block>(scratch_, bytes);
      e.bytes = bytes;
    } else if (e.count == key.count) {
      return use(e.block->data());
    }
    prepare(e.block->data());
    e.count = key.count;
    use(e.block->data());
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
    std::size_t bytes = 0;
    std::uint64_t count = 0;
  };

  Scratch& scratch_;
  std::map<std::pair<const void*, std::uint64_t>, Entry> entries_;
};

}  // namespace tandem::cpu
