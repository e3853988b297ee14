#include "datasets/mnist.h"

#include <cmath>

namespace tandem {
namespace {

std::uint32_t number(const std::uint8_t* header, int i) {  // i-th word of an IDX file
  const std::uint8_t* b = header + 4 * i;
  return std::uint32_t{b[0]} << 24 | std::uint32_t{b[1]} << 16 | std::uint32_t{b[2]} << 8 | b[3];
}

// Of an IDX file that begins so; infinite where it is none.
double idx_size(std::span<const std::uint8_t> beginning) {
  const int rank = beginning.size() < 4 || beginning[3] > 3 ? 0 : beginning[3];
  if (rank == 0 || beginning.size() < 4 + 4 * std::size_t(rank)) return INFINITY;
  double elements = 1;
  for (int axis = 1; axis <= rank; axis++) elements *= number(beginning.data(), axis);
  return 4 + 4 * rank + elements;
}

Dataset read_four_files(const std::string& name, const std::filesystem::path& folder,
                        const std::vector<std::string>& classes) {
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
  return {name, part(" train", "train"), part(" test", "t10k")};
}

}  // namespace

// Header: 0, 0, type (8 = unsigned byte), number of axes, then one 32-bit size per axis.
Tensor read_idx(ByteSource& file, int rank) {
  std::vector<std::uint8_t> header(4 + 4 * std::size_t(rank));
  file.read(header.data(), header.size());
  const std::uint8_t* words = header.data();
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
  Pictures p;
  p.name = std::move(name);
  p.classes = classes;
  ByteSource label_file =
      open_bytes(labels, remedy, idx_size);  // the small file first, so that mistakes are detected early
  const Tensor bytes = read_idx(label_file, 1);
  const std::int64_t n = bytes.size(0);
  p.labels = host_tensor({n}, DType::i32);
  const std::uint8_t* from = bytes.data<std::uint8_t>();
  std::int32_t* to = p.labels.write<std::int32_t>();
  for (std::int64_t i = 0; i < n; i++) {
    if (from[i] >= classes)
      label_file.mistaken("label ", int(from[i]), " at position ", i, ", expected 0 to ", classes - 1);
    to[i] = from[i];
  }
  ByteSource image_file = open_bytes(images, remedy, idx_size);
  const Tensor x = read_idx(image_file, 3);
  if (x.size(0) != n)
    image_file.mistaken(x.size(0), " pictures, expected ", n, " as there are labels in ", labels.string());
  p.images = x.reshape({n, x.size(1), x.size(2), 1});
  return p;
}

Dataset mnist(const std::filesystem::path& folder) {
  Dataset d = read_four_files("mnist", folder, {"0", "1", "2", "3", "4", "5", "6", "7", "8", "9"});
  measure(d);
  return d;
}

Dataset fashion_mnist(const std::filesystem::path& folder) {
  Dataset d = read_four_files(
      "fashion-mnist", folder,
      {"T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"});
  if (folder.filename() == "fashion-mnist-small") d.name = "fashion-mnist-small";
  d.train.name = d.name + " train";
  d.test.name = d.name + " test";
  for (Pictures* p : {&d.train, &d.test}) {  // of the 60 000 training pictures
    p->mean = {0.2860406f};
    p->std = {0.3530242f};
  }
  return d;
}

}  // namespace tandem
