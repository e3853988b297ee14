#include "layers/train/slices.h"

#include <algorithm>
#include <cstring>

#include "core/backend.h"

namespace tandem {

std::vector<std::byte> gather_slices(const Tensor& mine, const Slice& slice, const Shape& whole, Strategy& strategy,
                                     bool wanted) {
  constexpr std::size_t piece = 4 << 20;
  const std::size_t element = size_of(mine.dtype());
  auto begin_of = [&](int index) { return std::size_t(Slice{index, slice.count}.offset(whole)) * element; };
  std::string bytes(mine.bytes(), '\0');
  mine.backend().download(bytes.data(), mine.raw(), bytes.size());
  std::vector<std::byte> all(wanted ? std::size_t(whole.numel()) * element : 0);
  std::vector<bool> came(std::size_t(slice.count));
  for (std::size_t from = 0; from < begin_of(1); from += piece) {  // slice 0 is the longest
    const std::int32_t index = slice.index;
    std::string part(reinterpret_cast<const char*>(&index), sizeof index);
    if (from < bytes.size()) part += bytes.substr(from, piece);
    for (const std::string& theirs : strategy.gather(part, Strategy::Among::evaluating)) {
      std::int32_t i = -1;
      if (theirs.size() < sizeof i) continue;  // of a lost rank
      std::memcpy(&i, theirs.data(), sizeof i);
      require(i >= 0 && i < slice.count && theirs.size() - sizeof i <= begin_of(i + 1) - begin_of(i),
              "ranks write different parameters: they do not save the same thing");
      came[std::size_t(i)] = true;
      if (wanted) std::memcpy(all.data() + begin_of(i) + from, theirs.data() + sizeof i, theirs.size() - sizeof i);
    }
  }
  const auto lacking = std::find(came.begin(), came.end(), false);
  require(lacking == came.end(), "slice ", lacking - came.begin(), " of ", slice.count, " of a parameter of shape ",
          whole, " is on no rank of ", strategy.name(), ": it cannot be written as a whole");
  return all;
}

void make_whole(Module& model, Strategy& strategy) {
  for (auto& [name, p] : model.parameters()) {
    if (p->slice.count == 1) continue;
    const Tensor mine = p->variable.value();
    const auto bytes = gather_slices(mine, p->slice, p->shape, strategy, true);
    Tensor whole(mine.backend(), p->shape, mine.dtype());
    whole.backend().upload(whole.raw_write(), bytes.data(), bytes.size());
    p->slice = {};
    p->variable = Variable(whole, !p->frozen, name);
  }
}

}  // namespace tandem
