// Runs a model once to describe it: a summary of its modules (from the tape), and a list of its operations.
#pragma once
#include <string>
#include <vector>

#include "autograd/recorder.h"
#include "layers/module.h"

namespace tandem {

struct ModuleSummary {
  std::string path, type;  // "layer1.0.conv1", "Conv2d"; the model itself has an empty path
  Shape output;
  std::int64_t parameters = 0;  // its own, without those of inner modules
  double macs = 0;              // multiply-adds of its products and convolutions, per picture
  std::size_t saved_bytes = 0;  // saved for backward by its operations; a storage is counted once over all modules
};

struct ModelSummary {
  std::vector<ModuleSummary> modules;  // in the order of the tree
  Shape input;
  DType dtype = DType::f32;
  std::int64_t parameters = 0;
  double macs = 0;  // per picture
  std::size_t saved_bytes = 0, parameter_bytes = 0, buffer_bytes = 0;
  // The peak of saved activations and gradients of activations in a training step, without the scratch memory of
  // kernels.
  std::size_t backward_peak_bytes = 0;
  // The state of training besides parameters and gradients (an optimizer's vectors, a moving average): its name and
  // bytes. summary() sets those of SGD with momentum.
  std::string state = "sgd";
  std::size_t state_bytes = 0;
  // Parameters, gradients, buffers, the state of training and backward_peak_bytes.
  std::size_t training_bytes() const { return 2 * parameter_bytes + buffer_bytes + state_bytes + backward_peak_bytes; }
  std::string text() const;  // a table, and the sums in words
};

// A table as text, a line for each row. Columns are as wide as their widest cell: the first `left` begin at the left,
// the others end at the right.
std::string aligned(const std::vector<std::vector<std::string>>& rows, std::size_t left);

// Runs the model on zeros of this shape ([N, H, W, C]; N at least 2 with batch norm) in training mode. A model without
// memory gets memory on the CPU during the call. Afterwards the model is unchanged: statistics are restored.
ModelSummary summary(Module& model, const Shape& input, DType dtype = DType::f32);

// Runs two pictures of zeros, [H, W, C] each, through the model, which gets its memory if it has none yet. input and
// output, if given, are set to the tensors at both ends.
std::vector<Operation> operations_of(Module& model, Backend& backend, const Shape& picture, Tensor* input = nullptr,
                                     Tensor* output = nullptr);

}  // namespace tandem
