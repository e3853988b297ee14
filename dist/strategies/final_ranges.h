// Finds the parameter ranges with a final gradient while backward finishes the gradient segment by segment.
#pragma once
#include <vector>

#include "layers/optim/flat_parameters.h"

namespace tandem {

class FinalRanges {
 public:
  FinalRanges(const FlatParameters& flat, std::vector<Range> ranges);
  const Range& operator[](std::size_t r) const { return ranges_[r]; }
  std::size_t size() const { return ranges_.size(); }
  // The gradient of this segment is final. Returns the ranges that are now complete. A repeated segment means that
  // another backward has begun.
  std::vector<std::size_t> ready(const ParameterRange& parameter);
  bool complete(std::size_t r) const { return missing_[r] == 0; }
  bool empty(std::size_t r) const { return segments_[r] == 0; }  // it has no trained segment
  void restart();                                                // the next step begins

 private:
  std::vector<std::size_t> ranges_with(const ParameterRange& parameter) const;

  const FlatParameters& flat_;
  const std::vector<Range> ranges_;
  std::vector<std::size_t> missing_, segments_;  // per range: segments that are not final yet, and all segments
  std::vector<bool> seen_;                       // segments that were ready in this backward
};

}  // namespace tandem
