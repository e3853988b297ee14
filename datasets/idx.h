// The IDX format of the MNIST family: a header of big-endian numbers, then the elements.
#pragma once
#include <filesystem>
#include <string>

#include "datasets/bytes.h"
#include "datasets/dataset.h"

namespace tandem {

// Reads an IDX file of bytes with `rank` axes, .gz or plain, as a u8 tensor in host memory. `source` is how to get it
// (bytes.h).
Tensor read_idx(const std::filesystem::path& path, int rank, const std::string& source);
Tensor read_idx(ByteSource& file, int rank);

// Pictures of one channel and their labels 0 … classes − 1, in the format of the MNIST family. The caller sets mean and
// standard deviation.
Pictures idx_pictures(std::string name, const std::filesystem::path& images, const std::filesystem::path& labels,
                      int classes, const std::string& source);

}  // namespace tandem
