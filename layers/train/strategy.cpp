#include "layers/train/strategy.h"

#include <algorithm>
#include <cstring>

#include "layers/train/slices.h"

namespace tandem {

MetricSums Strategy::sum(const MetricSums& mine, Among among) {
  if (size() == 1) return mine;
  MetricSums sum;
  for (const MetricSums& rank : gathered(*this, mine, among)) sum = sum + rank;
  return sum;
}

std::vector<double> Strategy::sum(const std::vector<double>& mine, Among among) {
  if (size() == 1) return mine;
  std::vector<double> sum(mine.size());
  const std::string text(reinterpret_cast<const char*>(mine.data()), mine.size() * sizeof(double));
  for (const std::string& rank : gather(text, among)) {
    std::vector<double> theirs(mine.size());  // zeros of a lost rank
    std::memcpy(theirs.data(), rank.data(), std::min(rank.size(), text.size()));
    for (std::size_t i = 0; i < sum.size(); i++) sum[i] += theirs[i];
  }
  return sum;
}

}  // namespace tandem
