// The operations of one forward pass of a model, in eval mode.
#pragma once
#include <vector>

#include "autograd/recorder.h"
#include "layers/module.h"

namespace tandem {

// Runs two pictures of zeros, [H, W, C] each, through the model, which gets its memory if it has none yet. input and
// output, if given, are set to the tensors at both ends.
std::vector<Operation> operations_of(Module& model, Backend& backend, const Shape& picture, Tensor* input = nullptr,
                                     Tensor* output = nullptr);

}  // namespace tandem
