// Weights laid out for one algorithm, kept until the weights change. Training prepares them anew in each step, in the
// same memory; evaluation prepares them once.
#pragma once
#include <bit>
#include <map>
#include <memory>
#include <utility>

#include "core/cpu/scratch.h"

namespace tandem::cpu {

class PreparedWeights {
 public:
  explicit PreparedWeights(Scratch& scratch) : scratch_(scratch) {}

  // The prepared form `form` (any number that tells layouts apart) of the weights w[elements], `bytes` long: calls
  // prepare(to) when it is not there or stale, then use(prepared).
  template <class Prepare, class Use>
  void with(WeightKey key, std::uint64_t form, const float* w, std::int64_t elements, std::size_t bytes,
            const Prepare& prepare, const Use& use) {
    if (!key.owner) {
      Block once(scratch_, bytes);
      prepare(once.data());
      return use(once.data());
    }
    Entry& e = entries_[{key.owner, form}];
    const std::uint64_t sample = sample_of(w, elements);
    if (!e.block || e.bytes != bytes) {
      e.block.reset();
      e.block = std::make_unique<Block>(scratch_, bytes);
      e.bytes = bytes;
    } else if (e.count == key.count && e.weights == w && e.sample == sample) {
      return use(e.block->data());
    }
    prepare(e.block->data());
    e.count = key.count, e.weights = w, e.sample = sample;
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
    std::uint64_t count = 0, sample = 0;
    const float* weights = nullptr;
  };

  // A second look: an owner that died unannounced, and another born at its address with the same count, differ in
  // these.
  static std::uint64_t sample_of(const float* w, std::int64_t elements) {
    std::uint64_t hash = 0;
    for (std::int64_t i = 0; i < 16; i++)
      hash = (hash ^ std::bit_cast<std::uint32_t>(w[i * (elements - 1) / 15])) * 0x9e3779b97f4a7c15u;
    return hash;
  }

  Scratch& scratch_;
  std::map<std::pair<const void*, std::uint64_t>, Entry> entries_;
};

}  // namespace tandem::cpu
