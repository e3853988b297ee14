#include "dist/strategies/final_ranges.h"

#include <utility>

namespace tandem {

FinalRanges::FinalRanges(const FlatParameters& flat, std::vector<Range> ranges)
    : flat_(flat), ranges_(std::move(ranges)), segments_(ranges_.size()) {
  for (const ParameterRange& parameter : flat.parameter_ranges())
    for (std::size_t r : ranges_with(parameter)) segments_[r] += !parameter.frozen;
  restart();
}

std::vector<std::size_t> FinalRanges::ranges_with(const ParameterRange& parameter) const {
  std::vector<std::size_t> some;
  for (std::size_t r = 0; r < ranges_.size(); r++)
    if (ranges_[r].end > parameter.local_begin && ranges_[r].begin < parameter.local_begin + parameter.length)
      some.push_back(r);
  return some;
}

std::vector<std::size_t> FinalRanges::ready(const ParameterRange& parameter) {
  const auto s = std::size_t(&parameter - flat_.parameter_ranges().data());
  if (seen_[s]) restart();
  seen_[s] = true;
  std::vector<std::size_t> complete = ranges_with(parameter);
  std::erase_if(complete, [this](std::size_t r) { return --missing_[r] > 0; });
  return complete;
}

void FinalRanges::restart() {
  missing_ = segments_;
  seen_.assign(flat_.parameter_ranges().size(), false);
}

}  // namespace tandem
