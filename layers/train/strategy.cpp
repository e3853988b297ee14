#include "layers/train/strategy.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"

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

}  // namespace tandem
