#include "datasets/readers.h"

#include <cmath>

namespace tandem {
namespace {

std::uint32_t number(const std::uint8_t* header, int i) {  // i-th word of an IDX file
  const std::uint8_t* b = header + 4 * i;
  return std::uint32_t{b[0]} << 24 | std::uint32_t{b[1]} << 16 | std::uint32_t{b[2]} << 8 | b[3];
}

// The size in bytes of an IDX file with this beginning; infinite if it is too short, or no IDX file.
double idx_size(std::span<const std::uint8_t> beginning) {
  const int rank = beginning.size() < 4 || beginning[3] > 3 ? 0 : beginning[3];
  if (rank == 0 || beginning.size() < 4 + 4 * std::size_t(rank)) return INFINITY;
  double elements = 1;
  for (int axis = 1; axis <= rank; axis++) elements *= number(beginning.data(), axis);
  return 4 + 4 * rank + elements;
}

Dataset read_four_files(const std::string& name, const std::filesystem::path& folder,
                        const std::vector<std::string>& classes, const std::vector<float>& mean = {},
                        const std::vector<float>& std = {}) {
  const std::string remedy = "run " + download_command(name, folder);
  auto part = [&](const std::string& suffix, const std::string& prefix) {
    auto file = [&](const char* kind) {
      std::filesystem::path plain = folder / (prefix + kind);
      return std::filesystem::exists(plain) ? plain : folder / (prefix + kind + ".gz");
    };
    const auto images = file("-images-idx3-ubyte");
    Pictures p = idx_pictures(name + suffix, images, file("-labels-idx1-ubyte"), 10, remedy);
    if (p.height() != 28 || p.width() != 28)
      refuse(images.string(), ": has pictures of ", p.height(), " × ", p.width(),
             " pixels, expected 28 × 28: move it away and ", remedy);
    p.class_names = classes;
    return p;
  };
  return Dataset::of_parts(name, part(" train", "train"), part(" test", "t10k"), mean, std);
}

}  // namespace

// Header: 0, 0, type (8 = unsigned byte), number of axes, then one 32-bit size per axis.
Tensor read_idx(ByteSource& file, int rank) {
  const std::uint8_t* words = file.read(4 + 4 * std::size_t(rank));
  if (number(words, 0) != 0x800u + std::uint32_t(rank))
    file.mistaken("begins with the number ", number(words, 0), ", expected ", 0x800 + rank,
                  ": IDX, unsigned bytes, rank ", rank);
  Shape shape;
  for (int axis = 0; axis < rank; axis++) {
    if (number(words, 1 + axis) == 0) file.reject("its header says 0 along axis ", axis, ", expected at least 1");
    shape.append(number(words, 1 + axis));
  }
  return file.read_array(shape, DType::u8);
}

Pictures idx_pictures(std::string name, const std::filesystem::path& images, const std::filesystem::path& labels,
                      int classes, const std::string& remedy) {
  ByteSource label_file = open_bytes(labels, remedy, idx_size);  // the small file first, to detect mistakes early
  const Tensor y = label_file.classes_in(read_idx(label_file, 1), classes);
  ByteSource image_file = open_bytes(images, remedy, idx_size);
  const Tensor x = read_idx(image_file, 3);
  if (x.size(0) != y.size(0))
    image_file.mistaken(x.size(0), " pictures, expected ", y.size(0), " as there are labels in ", labels.string());
  const Shape shape = {x.size(0), x.size(1), x.size(2), 1};
  return {.name = std::move(name), .images = x.reshape(shape), .labels = y, .classes = classes};
}

Dataset mnist(const std::filesystem::path& folder) {
  return read_four_files("mnist", folder, {"0", "1", "2", "3", "4", "5", "6", "7", "8", "9"});
}

Dataset fashion_mnist(const std::filesystem::path& folder) {
  const bool small = folder.filename() == "fashion-mnist-small";
  return read_four_files(
      small ? "fashion-mnist-small" : "fashion-mnist", folder,
      {"T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"},
      {0.2860406f}, {0.3530242f});  // of the 60 000 training pictures
}

}  // namespace tandem
