// Finds the parameter ranges with a final gradient while backward finishes the gradient segment by segment.
#pragma once
#include <vector>

#include "layers/optim/flat_parameters.h"

namespace tandem {

class FinalRanges {
 public:
  FinalRanges(const FlatParameters& flat, std::vector<Range> ranges);
  // The gradient of this segment is final. Returns the ranges that are now complete. Call once per step and segment.
  std::vector<Range> ready(const ParameterRange& parameter);
  // Returns the incomplete ranges: those without a trained segment, or with a segment that backward did not reach.
  // Begins the next step.
  std::vector<Range> rest();

 private:
  const FlatParameters& flat_;
  std::vector<Range> ranges_;
  std::vector<std::vector<std::size_t>> of_parameter_;  // the ranges that contain a segment
  std::vector<std::size_t> missing_, segments_;         // per range: segments that are not final yet, and all segments
};

}  // namespace tandem
