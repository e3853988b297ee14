// Narrow copies of weights. Parameters are f32, but products with bf16 pictures need bf16 weights. When a segment is
// requested that was written since the last conversion, one kernel converts the whole parameter vector: once per step.
#pragma once
#include <functional>
#include <map>
#include <unordered_map>
#include <vector>

#include "core/tensor.h"

namespace tandem::cuda {

class NarrowWeights {
 public:
  // Queues the conversion of `numel` f32 numbers into the type of `to`.
  using Convert = std::function<void(const float* from, std::int64_t numel, Tensor& to)>;
  explicit NarrowWeights(Convert convert) : convert_(std::move(convert)) {}

  // The elements of w, in `type`, valid until w is written to. Null if w is not a segment of a parameter vector:
  // forget() is called only for segments, so the copy of another tensor could not be dropped.
  const void* of(const Tensor& w, DType type);
  void forget(const WriteCount& owner);  // its vector was destroyed
  // Marks every copy as stale. A recorded step must contain the conversion, since it would otherwise replay with old
  // weights.
  void convert_again();

 private:
  struct Copy {
    Tensor narrow;
    std::vector<std::uint64_t> counts;  // of the vector's segments, when it was converted; empty: stale
    std::unordered_map<const WriteCount*, std::size_t> index;
  };
  Convert convert_;
  std::map<std::pair<const Storage*, DType>, Copy> copies_;
};

}  // namespace tandem::cuda
