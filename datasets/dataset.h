// Labelled pictures in host memory, and functions that find their files.
#pragma once
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/tensor.h"

namespace tandem {

struct Pictures {
  std::string name;  // "cifar-10 train": begins every error message about them
  Tensor images;     // u8 [N, H, W, C] in host memory
  Tensor labels;     // i32 [N], 0 … classes − 1, in host memory
  int classes = 0;
  std::vector<std::string> class_names = {};  // one per class, or none
  std::vector<float> mean = {}, std = {};  // per channel, of the training pictures, with the bytes 0 … 255 as 0 … 1

  std::int64_t count() const { return images.defined() ? images.size(0) : 0; }
  std::int64_t height() const { return images.size(1); }
  std::int64_t width() const { return images.size(2); }
  std::int64_t channels() const { return images.size(3); }
};

struct Dataset {
  std::string name;  // "cifar-10", or the folder or file that it was read from
  Pictures train, test;

  int classes() const { return train.classes; }
  int channels() const { return int(train.channels()); }
  int side() const { return int(train.height()); }

  // Both parts get the same mean and standard deviation per channel. Default: those of the training pictures.
  static Dataset of_parts(std::string name, Pictures train, Pictures test, const std::vector<float>& mean = {},
                          const std::vector<float>& std = {});
  // The user's own pictures, in host memory. A tenth of them, chosen by `seed`, become the test pictures.
  static Dataset of(const Pictures& all, std::uint64_t seed = 0);
  // u8, row-major [N, H, W, C] with 1 to 4 channels, and labels 0 … classes − 1; both are copied. The number of classes
  // is the largest label + 1.
  static Dataset of(std::span<const std::uint8_t> images, const Shape& shape, std::span<const std::int32_t> labels,
                    const std::string& name = "pictures");
};

// How pictures in separate files are read (readers.h).
struct FolderOptions {
  int size = 0;              // side of the square they are resized to; 0: they are squares of one size already
  bool skip_broken = false;  // skips files that cannot be decoded, with a count on stderr, instead of throwing
};

// Loads a set by its name: mnist, fashion-mnist, cifar-10, cifar-100, cifar-100-coarse (find_data finds it; "cifar10"
// is accepted too), or a set of generated pictures, "synthetic-" + mnist, fashion-mnist or cifar-10. The directory
// "synthetic" selects generated pictures too. Other names are paths: a folder of pictures, or an .npy file
// (readers.h).
Dataset load_dataset(const std::string& name, const std::filesystem::path& directory = {},
                     const FolderOptions& folder = {});
std::string dataset_names();  // "mnist fashion-mnist …"

// The data that a program needs to give a trained model further pictures: classes (names, one per line), mean and std
// per channel with bytes as 0 … 1, channels, side, pictures (their name). Saved with the weights; examples/predict.cpp
// reads it.
std::map<std::string, std::string> description(const Pictures& pictures);

// The folder with the files of mnist, fashion-mnist, cifar-10 or cifar-100. If `directory` (the option --data) is
// given, only it is searched; otherwise $TANDEM_DATA, then data/. In each of them the set's own subfolder is searched,
// then the folder itself. Without a `directory`, if nothing is found, Fashion-MNIST's first pictures
// (fashion-mnist-small/) replace the whole set, with a message on stderr. Throws when nothing is found; the message
// names all searched folders and the command that downloads the set.
std::filesystem::path find_data(const std::string& name, const std::filesystem::path& directory = {});

// The command that downloads the files of a set to where they were found: "datasets/get-data.sh fashion-mnist data".
std::string download_command(const std::string& name, const std::filesystem::path& folder);

// u8 pictures [N, H, W, C] and their labels [N], allocated but not written to; one class for each name.
Pictures blank_pictures(std::string name, const Shape& shape, std::vector<std::string> class_names = {});

// The user's own pictures: u8, row-major [N, H, W, C] with 1 to 4 channels; they are copied. Mean and std are
// measured.
Pictures in_memory(std::string name, std::span<const std::uint8_t> images, const Shape& shape,
                   std::span<const std::int32_t> labels, int classes);

// Divides the numbers below `count` into {the rest, `held_back` of them}, each in ascending order. The choice depends
// only on the arguments, so two runs validate on the same pictures.
std::pair<std::vector<std::int32_t>, std::vector<std::int32_t>> hold_back(std::int64_t count, std::int64_t held_back,
                                                                          std::uint64_t seed);
// Holds back `held_back` pictures (0: none), for validation: returns {the rest, the held-back}, copied.
std::pair<Pictures, Pictures> split(const Pictures& pictures, std::int64_t held_back, std::uint64_t seed);
// These rows of a tensor in host memory, copied.
Tensor gather_rows(const Tensor& t, std::span<const std::int32_t> rows);
// The first class without a picture; none: every class has one.
std::optional<int> class_without_pictures(const Pictures& pictures);

// Throws when shapes, types, label range, mean or standard deviation are not consistent. The loader calls it.
void check(const Pictures& pictures);

// Mean and standard deviation of every channel, from exact sums over all pictures.
void measure(Pictures& pictures);

// An uninitialised tensor in host memory that keeps the objects it needs alive, so that a set of pictures belongs to no
// backend.
Tensor host_tensor(const Shape& shape, DType dtype);

}  // namespace tandem
