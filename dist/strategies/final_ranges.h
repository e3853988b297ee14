// Which ranges of the parameters have their final gradient, while backward finishes it segment by segment.
#pragma once
#include <vector>

#include "layers/optim/flat_parameters.h"

namespace tandem {

class FinalRanges {
 public:
  FinalRanges(const FlatParameters& flat, std::vector<Range> ranges);
  // The ranges that this segment, whose gradient is final now, completes. Once a step for each segment.
  std::vector<Range> ready(const ParameterRange& parameter);
  // The ranges that are not complete: without a trained segment, or with one that backward did not reach. Begins the
  // next step.
  std::vector<Range> rest();

 private:
  const FlatParameters& flat_;
  std::vector<Range> ranges_;
  std::vector<std::vector<std::size_t>> of_parameter_;  // ranges that a segment lies in
  std::vector<std::size_t> missing_, segments_;  // by range: how many segments are not final yet, and of how many
};

}  // namespace tandem
