// PyTorch's weights: safetensors files with the names and shapes of a PyTorch state_dict.
//
// Names are the same on both sides. Shapes are not: a filter is [O, I, H, W] there and [O, H, W, I] here, and a Linear
// behind a flattened picture reads it as (c, h, w) there and as (h, w, c) here. Which Linear that is, one forward pass
// tells.
#pragma once
#include <map>
#include <string>

#include "layers/module.h"

namespace tandem {

class Strategy;

// picture: [H, W, C] of the input. The model gets its memory if it has none yet; a FlatParameters that is built later
// keeps the values. Batch counters (num_batches_tracked) in the file are passed over, and so is a word before all of
// its names (module., _orig_mod.). Throws UsageError, with every tensor that is in the model or in the file only, or of
// another shape, before anything has been changed.
void import_torch(Module& model, Backend& backend, const Shape& picture, const std::string& path);

// For model.load_state_dict(safetensors.torch.load_file(path)). `about` goes into the file's metadata, for
// classifier.h. The old file stays until the new one is complete. Where layers are cut over ranks all ranks call it,
// with the strategy that gathers them; those that do not write, with an empty path.
void export_torch(Module& model, Backend& backend, const Shape& picture, const std::string& path,
                  const std::map<std::string, std::string>& about = {}, Strategy* strategy = nullptr);

}  // namespace tandem
