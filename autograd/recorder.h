// Records the operations of a model as they run. The ONNX export builds its graph from the record
// (layers/export/onnx.h), and the PyTorch importer finds the weights that follow a flattened picture
// (layers/export/torch_weights.h). The tape is not suitable for this: it leaves out operations that need no gradient,
// and batch norm differs in evaluation.
#pragma once
#include <string>
#include <vector>

#include "autograd/variable.h"

namespace tandem {

// One operation that ran. An optional input that was not given is left out at the end of inputs, and is an undefined
// Tensor in between.
struct Operation {
  std::string op;      // "conv2d"
  std::string module;  // path of the module that ran it: "layer1.0.conv1"
  Attributes attributes;
  std::vector<Tensor> inputs;
  Tensor output;

  double attribute(const char* name, std::size_t i = 0) const;  // throws when there is none
  std::string where() const { return module.empty() ? op : op + " in " + module; }
};

// While an object of this class exists, every operation of this thread is recorded, with or without a tape. The
// recorder keeps all tensors alive, so an address denotes the same value as long as the recorder exists.
class Recorder {
 public:
  std::vector<Operation> operations;  // in the order they ran

 private:
  const Restored<Recorder*> here_{mode().recorder, this};
};

}  // namespace tandem
