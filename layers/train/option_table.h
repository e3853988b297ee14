// The one table of the options that training programs share: name, field, default, text, and whether it changes what a
// step computes. The parser, --help, the run's identity in checkpoints and the start line of the metrics are made from
// it.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "layers/train/checkpoint.h"
#include "layers/train/options.h"

namespace tandem {

// Rows that read and write `options`, which must outlive them. The defaults are its present values.
std::vector<OptionSpec> option_table(Options& options);

// The rows that affect what a step computes, as text. fit() itself records the values of FitOptions.
Settings settings_of(const Options& options);

}  // namespace tandem
