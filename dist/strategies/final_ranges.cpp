#include "dist/strategies/final_ranges.h"

#include <utility>

namespace tandem {

FinalRanges::FinalRanges(const ParameterSpace& space, std::vector<Range> ranges)
    : space_(space), ranges_(std::move(ranges)), of_segment_(space.segments().size()), segments_(ranges_.size()) {
  for (std::size_t s = 0; s < of_segment_.size(); s++) {
    const Segment& segment = space.segments()[s];
    for (std::size_t r = 0; r < ranges_.size(); r++) {
      if (ranges_[r].end <= segment.local_begin || ranges_[r].begin >= segment.local_begin + segment.length) continue;
      of_segment_[s].push_back(r);
      segments_[r]++;
    }
  }
  missing_ = segments_;
}

std::vector<Range> FinalRanges::ready(const Segment& segment) {
  std::vector<Range> complete;
  for (std::size_t r : of_segment_[std::size_t(&segment - space_.segments().data())])
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
