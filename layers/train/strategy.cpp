#include "layers/train/strategy.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "core/error.h"

namespace tandem {

BatchSource& Strategy::batches(BatchSource& train, int accumulate) {
  if (BatchSource* own =
          own_part(train, accumulate,
                   {.worker = rank(), .workers = size(), .shares = size(), .weight = OwnPartOptions::Weight::pictures}))
    return *own;
  train.share(rank(), size());
  return train;
}

OwnPart* Strategy::own_part(BatchSource& train, int accumulate, const OwnPartOptions& options) {
  own_part_ = OwnPart::of(train, options);
  if (own_part_ && (accumulate > 1 || train.grows_with_ranks()))
    refuse("--partition: --accumulate and --batch-per-rank are for ranks that draw from all pictures: leave them out");
  return own_part_.get();
}

MetricSums Strategy::sum(const MetricSums& m, Among among) {
  const auto all = sum(std::vector{m.loss, m.correct, m.samples, m.interrupted}, among);
  return {all[0], all[1], all[2], all[3]};
}

std::vector<double> Strategy::sum(const std::vector<double>& mine, Among among) {
  if (size() == 1) return mine;
  std::vector<double> sum(mine.size());
  const std::string bytes(reinterpret_cast<const char*>(mine.data()), mine.size() * sizeof(double));
  for (const std::string& rank : gather(bytes, among)) {
    std::vector<double> theirs(mine.size());
    if (rank.size() == bytes.size()) std::memcpy(theirs.data(), rank.data(), rank.size());  // not of a lost rank
    std::transform(sum.begin(), sum.end(), theirs.begin(), sum.begin(), std::plus());
  }
  return sum;
}

}  // namespace tandem
