#include "layers/train/strategy.h"

#include "layers/train/slices.h"

namespace tandem {

MetricSums Strategy::sum(const MetricSums& mine, Among among) {
  if (size() == 1) return mine;
  MetricSums sum;
  for (const MetricSums& rank : gathered(*this, mine, among)) sum = sum + rank;
  return sum;
}

}  // namespace tandem
