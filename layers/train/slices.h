// Files contain whole parameters for any number of ranks with slices. To write a file, the slices are gathered; when a
// file is read, each rank reads its rows.
#pragma once
#include <cstring>
#include <type_traits>
#include <vector>

#include "layers/train/strategy.h"

namespace tandem {

// The value of every rank, in the order of ranks; T{} for a lost rank. All ranks call it (Strategy::gather).
template <class T>
std::vector<T> gathered(Strategy& strategy, const T& mine, Strategy::Among among = Strategy::Among::all) {
  static_assert(std::is_trivially_copyable_v<T>);
  std::vector<T> all;
  for (const std::string& bytes : strategy.gather({reinterpret_cast<const char*>(&mine), sizeof mine}, among)) {
    all.emplace_back();
    if (bytes.size() == sizeof(T)) std::memcpy(&all.back(), bytes.data(), sizeof(T));
  }
  return all;
}

// The whole tensor of this shape, in host memory, of which this rank has the slice `mine`; a slice of count 1 is
// returned as it is. All ranks call it, in the same order. Ranks that do not want the result get an undefined tensor,
// and need memory for 4 MiB of each slice at a time. Throws Error when a slice is on no rank, or without a strategy.
Tensor gather_slices(const Tensor& mine, const Slice& slice, const Shape& whole, Strategy* strategy, bool wanted);
// After training: every rank gets the whole of each divided parameter, so that the model can be used and exported like
// a model of a single machine. Flat parameters that were built before no longer belong to the model. All ranks call it.
void make_whole(Module& model, Strategy& strategy);

}  // namespace tandem
