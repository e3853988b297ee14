// MNIST (LeCun, Cortes, Burges 1998), handwritten digits, and Fashion-MNIST (Xiao, Rasul, Vollgraf 2017), clothes: each
// 60 000 + 10 000 pictures, 28 × 28, grey, ten classes, in the same four files of the IDX format.
#pragma once
#include "datasets/bytes.h"
#include "datasets/dataset.h"

namespace tandem {

// Reads the four official files in `folder`, compressed or gunzipped (a plain file is preferred to its .gz).
Dataset mnist(const std::filesystem::path& folder);
Dataset fashion_mnist(const std::filesystem::path& folder);

// Reads an IDX file of bytes with `rank` axes as a u8 tensor in host memory.
Tensor read_idx(ByteSource& file, int rank);
// Pictures of one channel and their labels 0 … classes − 1 from two IDX files, .gz or plain. `remedy` is how to get the
// files (bytes.h). The caller sets mean and standard deviation.
Pictures idx_pictures(std::string name, const std::filesystem::path& images, const std::filesystem::path& labels,
                      int classes, const std::string& remedy);

}  // namespace tandem
