// PyTorch's weights: safetensors files with the names and shapes of a PyTorch state_dict.
//
// Names are equal in PyTorch and Tandem. Shapes are not: a filter is [O, I, H, W] in PyTorch and [O, H, W, I] in
// Tandem, and a Linear after a flattened picture reads it as (c, h, w) in PyTorch and as (h, w, c) in Tandem. One
// forward pass shows which Linear this is.
#pragma once
#include <map>
#include <string>

#include "layers/module.h"

namespace tandem {

class Strategy;

// picture: [H, W, C] of the input. The model gets its memory if it has none yet; a FlatParameters that is built later
// keeps the values. Batch counters (num_batches_tracked) in the file are ignored, and so is a prefix of all its names
// (module., _orig_mod.). Throws UsageError before anything is changed; the message lists every tensor that is only in
// the model, only in the file, or has a different shape.
void import_torch(Module& model, Backend& backend, const Shape& picture, const std::string& path);

// For model.load_state_dict(safetensors.torch.load_file(path)). `about` is stored in the file's metadata, for
// classifier.h. The old file stays until the new one is complete. Where layers are divided among ranks, all ranks call
// it, with the strategy that gathers the layers; ranks that do not write pass an empty path.
void export_torch(Module& model, Backend& backend, const Shape& picture, const std::string& path,
                  const std::map<std::string, std::string>& about = {}, Strategy* strategy = nullptr);

}  // namespace tandem
