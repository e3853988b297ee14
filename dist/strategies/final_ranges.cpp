#include "dist/strategies/final_ranges.h"

#include <utility>

namespace tandem {

FinalRanges::FinalRanges(const FlatParameters& flat, std::vector<Range> ranges)
    : flat_(flat),
      ranges_(std::move(ranges)),
      of_parameter_(flat.parameter_ranges().size()),
      segments_(ranges_.size()) {
  for (std::size_t s = 0; s < of_parameter_.size(); s++) {
    const ParameterRange& parameter = flat.parameter_ranges()[s];
    if (parameter.frozen) continue;
    for (std::size_t r = 0; r < ranges_.size(); r++) {
      if (ranges_[r].end <= parameter.local_begin || ranges_[r].begin >= parameter.local_begin + parameter.length)
        continue;
      of_parameter_[s].push_back(r);
      segments_[r]++;
    }
  }
  restart();
}

std::vector<std::size_t> FinalRanges::ready(const ParameterRange& parameter) {
  const auto s = std::size_t(&parameter - flat_.parameter_ranges().data());
  if (seen_[s]) restart();
  seen_[s] = true;
  std::vector<std::size_t> complete;
  for (std::size_t r : of_parameter_[s])
    if (--missing_[r] == 0) complete.push_back(r);
  return complete;
}

void FinalRanges::restart() {
  missing_ = segments_;
  seen_.assign(of_parameter_.size(), false);
}

}  // namespace tandem
