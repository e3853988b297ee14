// The number of pictures for each pair of a class and a predicted class.
#pragma once
#include "core/batch.h"
#include "layers/module.h"

namespace tandem {

// i32 [classes, classes]: row = label, column = predicted class, over one epoch of the source, in eval mode and without
// recording; the model's mode is restored. Empty when the source has no batch.
Tensor confusion_matrix(Module& model, BatchSource& source);

}  // namespace tandem
