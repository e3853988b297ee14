// Files hold whole parameters, however many ranks have slices of them: written by gathering the slices, read by each
// rank's rows.
#pragma once
#include <cstddef>
#include <vector>

#include "layers/train/strategy.h"

namespace tandem {

// The bytes of a whole tensor of this shape, of which this rank has the slice `mine`. All ranks call it, in the same
// order. Ranks that do not want the result get nothing, and hold 4 MiB of each slice at a time. Throws Error when a
// slice is on no rank.
std::vector<std::byte> gather_slices(const Tensor& mine, const Slice& slice, const Shape& whole, Strategy& strategy,
                                     bool wanted);
// After training: every rank gets the whole of what is cut, so that the model can be used and exported as one of a
// single machine. Flat parameters that were built before are not those of the model any more. All ranks call it.
void make_whole(Module& model, Strategy& strategy);

}  // namespace tandem
