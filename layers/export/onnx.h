// ONNX: a trained model as a graph that onnxruntime and others run (opset 13, float).
//
// The graph takes "input" [N, C, H, W], N free, and gives "output". Pictures are normalised as in training (subtract
// the mean, divide by the standard deviation, per channel: the loader's numbers). Weights carry the names of the
// parameters. Where there is no protobuf library (onnx_none.cpp) everything here refuses.
#pragma once
#include <string>

#include "layers/module.h"

namespace tandem {

// The bytes of the file. picture: [H, W, C]. Throws UsageError naming the operation, and the module that runs it, when
// ONNX has no counterpart here.
std::string onnx_of(Module& model, Backend& backend, const Shape& picture);
// The old file stays until the new one is complete.
void export_onnx(Module& model, Backend& backend, const Shape& picture, const std::string& path);

}  // namespace tandem
