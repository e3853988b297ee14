#include "layers/train/strategy.h"

#include <cstdlib>
#include <sstream>

namespace tandem {

MetricSums Strategy::sum(const MetricSums& mine, Among among) {
  if (size() == 1) return mine;
  std::ostringstream text;
  text.precision(17);
  text << mine.loss << ' ' << mine.correct << ' ' << mine.samples << ' ' << mine.interrupted;
  MetricSums sum;
  for (const std::string& rank : gather(text.str(), among)) {
    const char* at = rank.c_str();  // empty for a lost rank: zeros. strtod reads inf and nan, a stream does not
    for (double* into : {&sum.loss, &sum.correct, &sum.samples, &sum.interrupted}) {
      char* end = nullptr;
      *into += std::strtod(at, &end);
      at = end;
    }
  }
  return sum;
}

}  // namespace tandem
