#include "layers/export/trace_model.h"

#include "layers/optim/flat_parameters.h"

namespace tandem {

std::vector<Operation> operations_of(Module& model, Backend& backend, const Shape& picture, Tensor* input,
                                     Tensor* output) {
  require(picture.rank() == 3, "a picture has the axes [H,W,C], not ", picture);
  for (auto& [name, p] : model.parameters())
    if (!p->variable.defined()) {
      FlatParameters gives_memory(model, backend, 1);
      break;
    }
  const InMode evaluates(model, false);
  NoGrad off;
  Alone alone;
  Recorder recorder;
  Variable x(Tensor::zeros(backend, {2, picture[0], picture[1], picture[2]}));
  Variable y = model(x);
  if (input) *input = x.value();
  if (output) *output = y.value();
  return std::move(recorder.operations);
}

}  // namespace tandem
