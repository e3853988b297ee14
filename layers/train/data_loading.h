// What every training program does between its data set and fit(): hold back pictures for validation, and load.
#pragma once
#include <optional>

#include "datasets/loader.h"
#include "layers/train/fit.h"
#include "layers/train/options.h"

namespace tandem {

// Three loaders, as the options say: training pictures in shuffled batches (augmented, mixed), those held back with
// --val, and test pictures. A last batch that training pictures do not fill is left out. Where they do not fill one of
// the program's default size, a smaller one is taken and printed; where they do not fill one that was asked for, that
// is refused.
class Loaders {
 public:
  Loaders(const Dataset& data, const Options& options, Backend& backend);
  operator FitData() { return {train, validation ? &*validation : nullptr, &test}; }

  Loader train;
  std::optional<Loader> validation;
  Loader test;

 private:
  Loaders(const std::pair<Pictures, Pictures>& parts, const Pictures& tested, const Options& options, Backend& backend);
};

}  // namespace tandem
