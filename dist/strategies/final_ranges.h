// Finds the parameter ranges with a final gradient while backward finishes the gradient segment by segment.
#pragma once
#include <utility>
#include <vector>

#include "layers/optim/flat_parameters.h"

namespace tandem {

class FinalRanges {
 public:
  FinalRanges(const FlatParameters& flat, std::vector<Range> ranges)
      : flat_(flat), ranges_(std::move(ranges)), segments_(ranges_.size()) {
    for (const ParameterRange& parameter : flat.parameter_ranges())
      for (std::size_t r : ranges_with(parameter)) segments_[r] += !parameter.frozen;
    restart();
  }
  const Range& operator[](std::size_t r) const { return ranges_[r]; }
  std::size_t size() const { return ranges_.size(); }
  // The gradient of this segment is final. Returns the ranges that are now complete. A repeated segment means that
  // another backward has begun.
  std::vector<std::size_t> ready(const ParameterRange& parameter) {
    const auto s = std::size_t(&parameter - flat_.parameter_ranges().data());
    if (seen_[s]) restart();
    seen_[s] = true;
    std::vector<std::size_t> complete = ranges_with(parameter);
    std::erase_if(complete, [this](std::size_t r) { return --missing_[r] > 0; });
    return complete;
  }
  bool complete(std::size_t r) const { return missing_[r] == 0; }
  bool empty(std::size_t r) const { return segments_[r] == 0; }  // it has no trained segment
  // The next step begins.
  void restart() {
    missing_ = segments_;
    seen_.assign(flat_.parameter_ranges().size(), false);
  }

 private:
  std::vector<std::size_t> ranges_with(const ParameterRange& parameter) const {
    std::vector<std::size_t> some;
    for (std::size_t r = 0; r < ranges_.size(); r++)
      if (ranges_[r].end > parameter.local_begin && ranges_[r].begin < parameter.local_begin + parameter.length)
        some.push_back(r);
    return some;
  }

  const FlatParameters& flat_;
  const std::vector<Range> ranges_;
  std::vector<std::size_t> missing_, segments_;  // per range: segments that are not final yet, and all segments
  std::vector<bool> seen_;                       // segments that were ready in this backward
};

}  // namespace tandem
