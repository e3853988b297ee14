// What a loader hands to the training loop.
#pragma once
#include <cstdint>

#include "core/tensor.h"

namespace tandem {

struct Batch {
  Tensor images;             // [b, H, W, C], f32 or bf16, normalised, on the loader's backend
  Tensor labels;             // i32 [b]
  Tensor samples;            // i32 [b]: which picture of the set each is, to address random numbers by
  std::int64_t index = 0;    // of this batch in its epoch, from 0
  std::int64_t epoch = 0;
  std::int64_t global = 0;   // pictures in this batch over all ranks: b / global is this rank's weight

  std::int64_t size() const { return samples.defined() ? samples.extent(0) : 0; }
};

}  // namespace tandem
