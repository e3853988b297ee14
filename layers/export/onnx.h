// ONNX: a trained model as a graph that onnxruntime and other programs run (opset 13, float).
//
// The input of the graph is "input" [N, C, H, W] with any N, its output is "output". Pictures must be normalised as in
// training (subtract the mean, divide by the standard deviation, per channel, with the loader's numbers). Weights have
// the names of the parameters. Without a protobuf library (none.cpp) all functions here throw.
#pragma once
#include <string>

#include "layers/module.h"

namespace tandem {

// The bytes of the file. picture: [H, W, C]. Throws UsageError, which names the operation and the module that runs it,
// when the operation is not implemented for ONNX.
std::string onnx_of(Module& model, Backend& backend, const Shape& picture);
// The old file stays until the new one is complete.
void export_onnx(Module& model, Backend& backend, const Shape& picture, const std::string& path);

}  // namespace tandem
