// The steps of every training program between its data set and fit(): hold back pictures for validation, make loaders.
#pragma once
#include <optional>

#include "datasets/loader.h"
#include "layers/train/fit.h"
#include "layers/train/options.h"

namespace tandem {

// Three loaders, according to the options: training pictures in shuffled batches (augmented, mixed), the pictures held
// back with --val, and test pictures. A last batch that training pictures do not fill is left out. If they do not fill
// one batch of the program's default size, a smaller size is taken and printed. If they do not fill one batch of a size
// that was given, this throws.
class Loaders {
 public:
  Loaders(const Dataset& data, const RunConfig& options, Backend& backend);
  operator FitData() { return {train, validation ? &*validation : nullptr, &test}; }

  const std::pair<Pictures, Pictures> parts;  // for training, and held back
  Loader train;
  std::optional<Loader> validation;
  Loader test;
};

}  // namespace tandem
