#include "cuda/weights.h"

#include "core/backend.h"

namespace tandem::cuda {

const void* NarrowWeights::of(const Tensor& w, DType type) {
  Storage& storage = *w.storage();
  if (&w.writes() == storage.whole()) return nullptr;
  Copy& copy = copies_[{&storage, type}];
  const auto segments = storage.segments();
  const std::int64_t numel = std::int64_t(storage.bytes() / sizeof(float));
  if (copy.index.size() != segments.size()) {
    copy.index.clear();
    for (std::size_t i = 0; i < segments.size(); i++) copy.index[segments[i].get()] = i;
    copy.counts.clear();
  }
  if (!copy.narrow.defined()) {
    MemoryUse use(Use::parameters);
    copy.narrow = Tensor(storage.backend(), {numel}, type);
  }
  const std::size_t mine = copy.index.at(&w.writes());
  if (copy.counts.empty() || copy.counts[mine] != segments[mine]->now()) {
    convert_(reinterpret_cast<const float*>(storage.data()), numel, copy.narrow);
    copy.counts.clear();
    for (const auto& s : segments) copy.counts.push_back(s->now());
  }
  const std::ptrdiff_t offset = static_cast<const float*>(w.raw()) - reinterpret_cast<const float*>(storage.data());
  return static_cast<const std::byte*>(copy.narrow.raw()) + std::size_t(offset) * size_of(type);
}

void NarrowWeights::forget(const WriteCount& owner) {
  std::erase_if(copies_, [&](const auto& entry) { return entry.second.index.count(&owner) != 0; });
}

void NarrowWeights::convert_again() {
  for (auto& [key, copy] : copies_) copy.counts.clear();
}

}  // namespace tandem::cuda
