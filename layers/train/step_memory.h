// What a training step will need beyond what is held already, found before the first one: where there is too little
// memory the kernel ends a process without a word.
#pragma once
#include "core/batch.h"
#include "layers/module.h"

namespace tandem {

struct StepMemory {
  // Activations and their gradients at the peak of a step, and the picture in all batches under way
  std::size_t per_picture = 0;
  std::size_t left = 0;  // on the model's device, for this rank; −1: unknown
  std::int64_t fits() const { return per_picture ? std::int64_t(left / per_picture) : 0; }  // the largest batch
};

// Runs the model forward on two pictures of this shape [N, H, W, C], on its own device, and looks at the tape
// (layers/export/summary.h): some milliseconds. What kernels borrow and the tape's nodes are taken to be a tenth of the
// rest.
StepMemory step_memory(Module& model, const Tensor& images);

// Throws UsageError when a step on such a batch cannot fit: what it needs, what there is, and the largest batch that
// fits. Free of cost where the batch is small beside the memory. Parameters, their gradients, the optimizer's state and
// the data set are held by then, and so not in what is left.
void require_memory(Module& model, const Batch& batch);

}  // namespace tandem
