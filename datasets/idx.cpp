#include "datasets/idx.h"

namespace tandem {

Tensor read_idx(const std::filesystem::path& path, int rank, const std::string& source) {
  return read_idx(*open_bytes(path, source), rank);
}

// Header: 0, 0, type (8 = unsigned byte), number of axes, then one 32-bit size per axis.
Tensor read_idx(ByteSource& file, int rank) {
  std::uint64_t header = 4 + 4 * std::uint64_t(rank);
  auto number = [&] {
    std::uint8_t b[4];
    file.read(b, 4, header);
    return std::uint32_t{b[0]} << 24 | std::uint32_t{b[1]} << 16 | std::uint32_t{b[2]} << 8 | b[3];
  };
  std::uint32_t magic = number(), expected = 0x800u + std::uint32_t(rank);
  if (magic != expected)
    file.mistaken("begins with the number ", magic, ", expected ", expected, ": IDX, unsigned bytes, ", rank,
                  rank > 1 ? " axes" : " axis");
  Shape shape;
  std::uint64_t numel = 1;
  for (int axis = 0; axis < rank; axis++) {
    std::uint32_t size = number();
    if (size == 0) file.reject("its header says 0 along axis ", axis, ", expected at least 1");
    shape.append(size);
    if (numel > UINT64_MAX / 2 / size) file.reject("its header is damaged: it announces ", shape, " bytes");
    numel *= size;
  }
  if (header + numel > file.at_most())  // before memory is asked for
    file.reject("truncated, or its header ", shape, " is damaged: it holds at most ", file.at_most(),
                " bytes, expected ", header + numel);
  Tensor t = host_tensor(shape, DType::u8);
  file.read(t.raw_write(), numel, header + numel);
  file.expect_end();
  return t;
}

Pictures idx_pictures(std::string name, const std::filesystem::path& images, const std::filesystem::path& labels,
                      int classes, const std::string& source) {
  Pictures p;
  p.name = std::move(name);
  p.classes = classes;
  Tensor bytes = read_idx(labels, 1, source);  // the small file first: a mistake shows at once
  std::int64_t n = bytes.size(0);
  p.labels = host_tensor({n}, DType::i32);
  const std::uint8_t* from = bytes.data<std::uint8_t>();
  std::int32_t* to = p.labels.write<std::int32_t>();
  for (std::int64_t i = 0; i < n; i++) {
    if (from[i] >= classes)
      refuse(labels.string(), ": is damaged, or another data set's (label ", int(from[i]), " at position ", i,
             ", expected 0 to ", classes - 1, "): move it away and ", source);
    to[i] = from[i];
  }
  Tensor x = read_idx(images, 3, source);
  if (x.size(0) != n)
    refuse(images.string(), ": has ", x.size(0), " pictures, expected ", n, " as there are labels in ", labels.string(),
           ": move both away and ", source);
  p.images = x.reshape({n, x.size(1), x.size(2), 1});
  return p;
}

}  // namespace tandem
