// MNIST (LeCun, Cortes, Burges 1998), handwritten digits, and Fashion-MNIST (Xiao, Rasul, Vollgraf 2017), clothes: each
// 60 000 + 10 000 pictures, 28 × 28, grey, ten classes, in the same four files.
#pragma once
#include "datasets/dataset.h"

namespace tandem {

// Reads the four official files in `folder`, compressed or gunzipped (a plain file is preferred to its .gz).
Dataset mnist(const std::filesystem::path& folder);
Dataset fashion_mnist(const std::filesystem::path& folder);

}  // namespace tandem
