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
  missing_ = segments_;
}

std::vector<Range> FinalRanges::ready(const ParameterRange& parameter) {
  std::vector<Range> complete;
  for (std::size_t r : of_parameter_[std::size_t(&parameter - flat_.parameter_ranges().data())])
    if (--missing_[r] == 0) complete.push_back(ranges_[r]);
  return complete;
}

std::vector<Range> FinalRanges::rest() {
  std::vector<Range> all;
  for (std::size_t r = 0; r < ranges_.size(); r++)
    if (missing_[r] > 0 || segments_[r] == 0) all.push_back(ranges_[r]);
  missing_ = segments_;
  return all;
}

}  // namespace tandem
