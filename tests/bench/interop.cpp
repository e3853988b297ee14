// The other side of tests/reference/interop.py: runs a model on the input of a dump, with PyTorch's weights or ("-")
// its own, and writes what it gave, its weights and its ONNX graph.
#include <cstdlib>

#include "core/files/safetensors.h"
#include "layers/export/onnx.h"
#include "layers/export/torch_weights.h"
#include "layers/models/models.h"
#include "layers/optim/flat_parameters.h"
#include "layers/train/options.h"

using namespace tandem;

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    if (argc != 8) refuse("usage: interop MODEL CLASSES CHANNELS SIDE WEIGHTS|- DUMP PREFIX");
    const int channels = std::atoi(argv[3]), side = std::atoi(argv[4]);
    const std::string weights = argv[5], prefix = argv[7];
    auto backend = cpu_backend();
    auto model = make_model(argv[1], std::atoi(argv[2]), channels, side);
    FlatParameters flat(*model, *backend, 1);
    const Shape picture{side, side, channels};
    if (weights != "-") import_torch(*model, *backend, picture, weights);

    NoGrad off;
    model->eval();
    Variable x(SafetensorsFile(argv[6]).tensor("input", *backend));
    SafetensorsWriter writer;
    writer.add("logits", (*model)(transpose(x, {0, 2, 3, 1})).value());
    writer.write(prefix + ".logits.safetensors");
    export_torch(*model, *backend, picture, prefix + ".weights.safetensors");
    export_onnx(*model, *backend, picture, prefix + ".onnx");
  });
}
