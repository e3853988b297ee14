// Generated pictures, for examples and tests that must run without files.
#pragma once
#include "datasets/dataset.h"

namespace tandem {

// Gratings: stripes of one of five slopes and two widths make ten classes. Phase, sign of the slope, contrast,
// brightness, colours and noise are random, so the mean picture of every class is uniform. A model must therefore use
// neighbouring pixels: a linear model stays below 30 %, a small convolutional network exceeds 95 %. Mirroring and
// shifting do not change the class.
struct SyntheticOptions {
  std::string name = "synthetic";
  std::int64_t side = 28, channels = 1;  // pictures [side, side, channels], 1 to 4 channels
  std::int64_t train = 60000, test = 10000;
  std::uint64_t seed = 0;  // picture i depends only on (seed, train or test, i)
  int noise = 48;          // uniform in ± noise around each pixel value 0 … 255; at most 64
};

Dataset synthetic(const SyntheticOptions& options = {});

}  // namespace tandem
