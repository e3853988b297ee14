// Fashion-MNIST (Xiao, Rasul, Vollgraf 2017): 60 000 + 10 000 pictures of clothes, 28 × 28, grey, ten classes.
#pragma once
#include "datasets/dataset.h"

namespace tandem {

// From the four official files in `folder`, compressed or gunzipped (a plain file is preferred to its .gz).
Dataset fashion_mnist(const std::filesystem::path& folder);

}  // namespace tandem
