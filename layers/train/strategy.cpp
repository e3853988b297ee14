#include "layers/train/strategy.h"

#include <algorithm>

#include "core/backend.h"
#include "datasets/dataset.h"

namespace tandem {

BatchSource& Strategy::batches(BatchSource& train, int accumulate) {
  const OwnPartOptions together{.worker = rank(), .workers = size(), .shares = size(), .averaged = true};
  if (OwnPart* own = own_part(train, accumulate, together)) return *own;
  train.share(rank(), size());
  return train;
}

void Strategy::prepare(Module&, Task&, const PrepareOptions& options) {
  if (options.sync_batch_norm && size() > 1)
    refuse("--sync-bn with ", name(), ": it has no statistics over all ranks: leave it out, or choose all-reduce");
}

OwnPart* Strategy::own_part(BatchSource& train, int accumulate, const OwnPartOptions& options) {
  own_part_ = OwnPart::of(train, options);
  if (own_part_ && (accumulate > 1 || train.grows_with_ranks()))
    refuse("--partition: --accumulate and --batch-per-rank are for ranks that draw from all pictures: leave them out");
  return own_part_.get();
}

MetricSums Strategy::sum(const MetricSums& m, Among among) {
  if (size() == 1) return m;
  std::vector<double> mine{m.loss, m.correct, m.samples, m.interrupted}, all(mine.size());
  mine.insert(mine.end(), m.classes.begin(), m.classes.end());
  const std::string bytes(reinterpret_cast<const char*>(mine.data()), mine.size() * sizeof(double));
  for (const std::string& rank : gather(bytes, among)) {  // that of a lost rank is empty
    std::vector<double> theirs(rank.size() / sizeof(double));
    std::memcpy(theirs.data(), rank.data(), rank.size());
    all.resize(std::max(all.size(), theirs.size()));
    std::transform(theirs.begin(), theirs.end(), all.begin(), all.begin(), std::plus());
  }
  return {all[0], all[1], all[2], all[3], {all.begin() + 4, all.end()}};
}

Tensor gather_slices(const Tensor& mine, const Slice& slice, const Shape& whole, Strategy* strategy, bool wanted) {
  if (slice.count == 1) return mine;
  require(strategy, "a parameter of shape ", whole, " is cut over ranks: give the strategy that can gather it");
  constexpr std::size_t piece = 4 << 20;
  const std::size_t element = size_of(mine.dtype());
  auto begin_of = [&](int index) { return std::size_t(Slice{index, slice.count}.offset(whole)) * element; };
  std::string bytes(mine.bytes(), '\0');
  mine.backend().download(bytes.data(), mine.raw(), bytes.size());
  Tensor all = wanted ? host_tensor(whole, mine.dtype()) : Tensor();
  std::vector<bool> came(std::size_t(slice.count));
  for (std::size_t from = 0; from < begin_of(1); from += piece) {  // slice 0 is the longest
    const std::int32_t index = slice.index;
    std::string part(reinterpret_cast<const char*>(&index), sizeof index);
    if (from < bytes.size()) part += bytes.substr(from, piece);
    for (const std::string& theirs : strategy->gather(part, Strategy::Among::evaluating)) {
      std::int32_t i = -1;
      if (theirs.size() < sizeof i) continue;  // of a lost rank
      std::memcpy(&i, theirs.data(), sizeof i);
      require(i >= 0 && i < slice.count && theirs.size() - sizeof i <= begin_of(i + 1) - begin_of(i),
              "ranks write different parameters: they do not save the same thing");
      came[std::size_t(i)] = true;
      if (!wanted) continue;
      auto* to = static_cast<std::byte*>(all.raw_write()) + begin_of(i) + from;
      std::memcpy(to, theirs.data() + sizeof i, theirs.size() - sizeof i);
    }
  }
  const auto lacking = std::find(came.begin(), came.end(), false);
  require(lacking == came.end(), "slice ", lacking - came.begin(), " of ", slice.count, " of a parameter of shape ",
          whole, " is on no rank of ", strategy->name(), ": it cannot be written as a whole");
  return all;
}

void make_whole(Module& model, Strategy& strategy) {
  for (auto& [name, p] : model.parameters()) {
    if (p->slice.count == 1) continue;
    const Tensor whole = gather_slices(p->variable.value(), p->slice, p->shape, &strategy, true);
    p->slice = {};
    p->variable = Variable(whole.to(p->variable.backend()), !p->frozen, name);
  }
}

}  // namespace tandem
