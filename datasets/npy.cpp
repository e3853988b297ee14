#include "datasets/readers.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <regex>

#include "core/files/json.h"
#include "core/text.h"

namespace tandem {
namespace {

static_assert(std::endian::native == std::endian::little);

struct Header {
  char kind = 0;  // 'u' and 'i' for whole numbers, 'f'
  int width = 0;  // bytes of an element
  Shape shape;
};

// The header's text is a Python dictionary of three entries, padded with spaces and ended by a line feed.
Header read_header(ByteSource& file) {
  const std::uint8_t* start = file.read(10);
  if (std::memcmp(start, "\x93NUMPY", 6) != 0)
    file.mistaken("its first bytes are not \\x93NUMPY, as those of an .npy file are; an .npz file holds several such");
  const int version = start[6];
  if (version < 1 || version > 3) file.mistaken("version ", version, " of the .npy format, expected 1, 2 or 3");
  std::size_t length = start[8] | start[9] << 8;
  if (version > 1) {
    file.read(2);
    length |= std::size_t(start[10]) << 16 | std::size_t(start[11]) << 24;
  }
  if (length > 4096) file.reject("its header announces ", length, " bytes of text");
  const std::string text(reinterpret_cast<const char*>(file.read(length)), length);
  static const std::regex dictionary(
      R"(\{'descr': *'([<>|=])(\w)(\d{1,4})', *'fortran_order': *(True|False), *'shape': *\(([\d, ]*)\),? *\}\s*)"),
      number("\\d+");
  std::smatch part;
  const bool numbers = std::regex_match(text, part, dictionary);
  if (!numbers || (part[1] == ">" && part[3] != "1"))
    file.mistaken("its header is ", plain_text(text), ", expected an array of little-endian numbers");
  if (part[4] == "True") file.mistaken("its array is in Fortran order, expected numpy.ascontiguousarray(array)");
  Header h{part[2].str()[0], std::stoi(part[3]), {}};
  const std::string sizes = part[5];
  for (std::sregex_iterator at(sizes.begin(), sizes.end(), number), end; at != end; ++at) {
    const auto size = parsed<std::int64_t>(at->str());
    if (!size || h.shape.rank() == Shape::max_rank)
      file.mistaken("the shape (", sizes, "), expected at most six axes, and smaller sizes");
    h.shape.append(*size);
  }
  return h;
}

}  // namespace

Tensor read_npy(ByteSource& file) {
  const Header h = read_header(file);
  if (h.kind == 'u' && h.width == 1) return file.read_array(h.shape, DType::u8);
  if (h.kind == 'f' && h.width == 4) return file.read_array(h.shape, DType::f32);
  if ((h.kind != 'u' && h.kind != 'i') || h.width > 8 || !std::has_single_bit(unsigned(h.width)))
    file.mistaken("elements of type '", h.kind, h.width, "', expected u1, f4 or whole numbers: array.astype('f4') or ",
                  "array.astype('i8')");
  file.expect_array(h.shape, std::size_t(h.width));
  const std::uint8_t* elements = file.read(std::size_t(h.shape.numel() * h.width));
  file.expect_end();
  Tensor t = host_tensor(h.shape, DType::i32);
  std::int32_t* to = t.write<std::int32_t>();
  const int sign = h.kind == 'i' ? 64 - 8 * h.width : 0;
  for (std::int64_t i = 0; i < t.numel(); i++) {
    std::int64_t v = 0;
    std::memcpy(&v, elements + i * h.width, std::size_t(h.width));
    v = v << sign >> sign;
    if (!std::in_range<std::int32_t>(v) || (h.kind == 'u' && v < 0))
      file.mistaken("element ", i, " is ", v, ", expected at most 31 bits");
    to[i] = std::int32_t(v);
  }
  return t;
}

Pictures npy_pictures(const std::string& name, ByteSource& images, ByteSource& labels) {
  Pictures p;
  p.name = name;
  const Tensor y = read_npy(labels);  // the small file first, so that mistakes are detected early
  if (y.rank() != 1 || y.numel() == 0 || y.dtype() == DType::f32)
    labels.mistaken("labels ", y.shape(), " of type ", name_of(y.dtype()), ", expected whole numbers [N]");
  p.labels = labels.classes_in(y);
  p.classes = 1 + *std::max_element(p.labels.data<std::int32_t>(), p.labels.data<std::int32_t>() + y.numel());

  const Tensor x = read_npy(images);
  const bool square = (x.rank() == 3 || x.rank() == 4) && x.size(1) == x.size(2);
  if (!square || x.numel() == 0 || x.dtype() == DType::i32 || (x.rank() == 4 && x.size(3) > 4))
    images.mistaken("pictures ", x.shape(), " of type ", name_of(x.dtype()), ", expected u8, or f32 from 0 to 1, of ",
                    "the shape [N, side, side] or [N, side, side, channels], at most 4 channels");
  if (x.size(0) != y.numel())
    images.mistaken(x.size(0), " pictures, expected ", y.numel(), " as there are labels in ", labels.path().string());
  const Shape shape = {x.size(0), x.size(1), x.size(2), x.rank() == 4 ? x.size(3) : 1};
  p.images = x.dtype() == DType::u8 ? x.reshape(shape) : host_tensor(shape, DType::u8);
  if (x.dtype() == DType::u8) return p;
  const float* from = x.data<float>();
  std::uint8_t* bytes = p.images.write<std::uint8_t>();
  for (std::int64_t i = 0; i < x.numel(); i++) {
    if (!(from[i] >= 0 && from[i] <= 1))
      images.mistaken("element ", i, " is ", from[i], ", expected 0 to 1; pictures from 0 to 255: array.astype('u1')");
    bytes[i] = std::uint8_t(std::lround(255 * from[i]));
  }
  return p;
}

Dataset npy_dataset(const std::filesystem::path& images) {
  namespace fs = std::filesystem;
  // NAME.npy → NAME_labels.npy; if that does not exist, x_NAME.npy → y_NAME.npy.
  auto labels_of = [](const fs::path& path) {
    const std::string stem = path.stem().string();
    const fs::path labels = path.parent_path() / (stem + "_labels.npy");
    if (fs::exists(labels) || !(stem.starts_with("x_") || stem.starts_with("X_"))) return labels;
    return path.parent_path() / std::string("y").append(stem, 1).append(".npy");
  };
  auto part = [&](const fs::path& path) {
    ByteSource x = open_bytes(path, "save the pictures there with numpy.save"),
               y = open_bytes(labels_of(path), "save the labels of " + path.string() + " there with numpy.save");
    return npy_pictures(plain_text(path.string()), x, y);
  };
  Pictures train = part(images);
  if (train.classes < 2) refuse(labels_of(images).string(), ": all labels are 0, expected at least two classes");
  if (const auto gap = class_without_pictures(train))
    refuse(labels_of(images).string(), ": no picture has the label ", *gap, ", the largest is ", train.classes - 1,
           ", expected 0, 1, 2, … without a gap: numpy.unique(labels, return_inverse=True)[1] numbers them so");
  std::string name = images.filename().string();
  const std::size_t at = name.find("train");
  if (at == name.npos) return Dataset::of(train);
  const fs::path other = images.parent_path() / name.replace(at, 5, "test");
  if (!fs::exists(other)) return Dataset::of(train);
  Pictures test = part(other);
  if (test.height() != train.height() || test.channels() != train.channels())
    refuse(other.string(), ": pictures ", test.images.shape(), ", expected the shape of those in ", images.string(),
           ", ", train.images.shape(), ": write both alike");
  if (test.classes > train.classes)
    refuse(labels_of(other).string(), ": has the label ", test.classes - 1,
           ", and the largest of the training pictures is ", train.classes - 1);
  test.classes = train.classes;
  return Dataset::of_parts(images.string(), std::move(train), std::move(test));
}

}  // namespace tandem
