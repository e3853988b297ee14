// Files contain whole parameters for any number of ranks with slices. To write a file, the slices are gathered; when a
// file is read, each rank reads its rows.
#pragma once
#include <cstddef>
#include <vector>

#include "layers/train/strategy.h"

namespace tandem {

// The bytes of a whole tensor of this shape, of which this rank has the slice `mine`. All ranks call it, in the same
// order. Ranks that do not want the result get an empty vector, and need memory for 4 MiB of each slice at a time.
// Throws Error when a slice is on no rank.
std::vector<std::byte> gather_slices(const Tensor& mine, const Slice& slice, const Shape& whole, Strategy& strategy,
                                     bool wanted);
// After training: every rank gets the whole of each divided parameter, so that the model can be used and exported like
// a model of a single machine. Flat parameters that were built before no longer belong to the model. All ranks call it.
void make_whole(Module& model, Strategy& strategy);

}  // namespace tandem
