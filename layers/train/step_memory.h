// The memory that a training step will need in addition to the memory already in use, computed before the first step:
// if there is too little memory, the operating system ends the process without a message.
#pragma once
#include "core/batch.h"
#include "layers/module.h"

namespace tandem {

struct StepMemory {
  // Activations and their gradients at the peak of a step, and the picture in all batches that exist at a time
  std::size_t per_picture = 0;
  std::size_t left = 0;  // on the model's device, for this rank; −1: unknown
  std::int64_t fits() const { return per_picture ? std::int64_t(left / per_picture) : 0; }  // the largest batch
};

// Runs the model forward on two pictures of this shape [N, H, W, C], on its own device, and measures the tape
// (layers/export/summary.h). This takes some milliseconds. Scratch memory of kernels and the tape's nodes are estimated
// as a tenth of the rest.
StepMemory step_memory(Module& model, const Tensor& images);

// Throws UsageError when a step on such a batch cannot fit; the message has the needed memory, the available memory and
// the largest batch that fits. It costs nothing if the batch is small compared to the memory. Parameters, their
// gradients, the optimizer's state and the data set are already allocated, and so are not counted as available.
void require_memory(Module& model, const Batch& batch);

}  // namespace tandem
