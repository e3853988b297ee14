#include "datasets/npy.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <set>

#include "core/files/json.h"

namespace tandem {
namespace {

static_assert(std::endian::native == std::endian::little);

// The header is a Python dictionary of three entries, padded with spaces and ended by a line feed:
// {'descr': '<f4', 'fortran_order': False, 'shape': (60000, 28, 28), }
struct Header {
  std::string type;
  bool fortran = false;
  std::vector<std::uint64_t> shape;
  std::uint64_t before = 0;  // bytes of the file before the elements
};

// The line of NumPy that saves the array anew. {} in `changed` stands for the loaded array: "{}.astype('u1')".
std::string again(const ByteSource& file, const std::string& changed, bool objects = false) {
  const std::string path = "'" + file.path().string() + "'";
  const std::size_t at = changed.find("{}");
  return "numpy.save(" + path + ", " + changed.substr(0, at) + "numpy.load(" + path +
         (objects ? ", allow_pickle=True)" : ")") + changed.substr(at + 2) + ")";
}

// Rewrites the text as JSON (other quotes and brackets, no comma before a closing one) and parses it.
Header parsed_header(const std::string& text, std::uint64_t before, const ByteSource& file) {
  const auto wrong = [&](const auto&... what) {
    file.mistaken("the text of its header: ", what..., "; where NumPy reads it, ", again(file, "{}"),
                  " writes a header of today");
  };
  const std::string python = "'()TF", as_json = "\"[]tf";
  std::string json;
  for (const char c : text) {
    const std::size_t other = python.find(c), last = c == ')' || c == '}' ? json.find_last_not_of(' ') : json.npos;
    if (last != json.npos && json[last] == ',') json.resize(last);
    json += other == python.npos ? c : as_json[other];
  }
  Json dictionary;
  try {
    dictionary = Json::parse(json);
  } catch (const JsonError& e) {
    wrong(e.what());
  }
  const Json *type = dictionary.find("descr"), *fortran = dictionary.find("fortran_order"),
             *shape = dictionary.find("shape");
  if (!type || !fortran || !shape || dictionary.members.size() != 3 || !fortran->is(Json::Kind::boolean) ||
      !shape->is(Json::Kind::array))
    wrong("expected descr, fortran_order and shape");
  if (!type->is(Json::Kind::text)) wrong("its elements are structures, which are not read");
  Header h{type->text, fortran->boolean, {}, before};
  for (const Json& size : shape->items) {
    if (!size.is(Json::Kind::number) || !(size.number >= 0 && size.number < 0x1p62) ||
        size.number != std::floor(size.number))
      wrong("expected a smaller size");
    h.shape.push_back(std::uint64_t(size.number));
  }
  return h;
}

// The text of the header, and how many bytes of the file come before the elements.
std::pair<std::string, std::uint64_t> header_text(ByteSource& file) {
  std::uint8_t start[12] = {};
  file.read(start, 10, 10);
  if (std::memcmp(start, "PK", 2) == 0) refuse_npz(file.path());
  if (std::memcmp(start, "\x93NUMPY", 6) != 0)
    file.mistaken("its first bytes are not \\x93NUMPY, as those of an .npy file are");
  const int version = start[6];
  if (version < 1 || version > 3) file.mistaken("version ", version, " of the .npy format, expected 1, 2 or 3");
  std::uint64_t length = start[8] | start[9] << 8, before = 10;
  if (version > 1) {
    file.read(start + 10, 2, 12);
    length |= std::uint64_t(start[10]) << 16 | std::uint64_t(start[11]) << 24;
    before = 12;
  }
  if (before + length > file.at_most() || length > 1 << 20)
    file.reject("its header announces ", length, " bytes of text");
  std::string text(length, ' ');
  file.read(text.data(), length, before + length);
  return {text, before + length};
}

// 'u' or 'i' for whole numbers, 'f', 'b' for truth values, 'U' and 'S' for text, 'O' for objects, …
char kind_of(const Header& h) { return h.type.size() > 1 ? h.type[1] : ' '; }

// u1 i1 u2 … i8, f4: what is read.
bool readable(const Header& h) {
  static const std::set<std::string> types{"u1", "f4", "i1", "u2", "i2", "u4", "i4", "u8", "i8"};
  if (h.type.size() != 3 || !types.contains(h.type.substr(1))) return false;
  return h.type[0] == '>' ? h.type[2] == '1' : std::strchr("<|=", h.type[0]) != nullptr;
}

Shape shape_of(const Header& h) {
  Shape shape;
  for (const std::uint64_t size : h.shape) shape.append(std::int64_t(size));
  return shape;
}

Header header_of(ByteSource& file) {
  const auto [text, before] = header_text(file);
  const Header h = parsed_header(text, before, file);
  if (h.fortran)
    file.mistaken("its array is in Fortran order, expected C order: ", again(file, "numpy.ascontiguousarray({})"),
                  " makes it so");
  if (h.shape.size() > std::size_t(Shape::max_rank)) file.mistaken(h.shape.size(), " axes, expected at most six");
  return h;
}

void expect_labels(const Header& h, const ByteSource& file) {
  const char kind = kind_of(h);
  const bool whole = readable(h) && kind != 'f', one_hot = h.shape.size() == 2 && h.shape[1] > 1;
  if (whole && h.shape.size() == 1) return;
  std::string mended = "{}";
  if (kind == 'U' || kind == 'S' || kind == 'O')
    mended = "numpy.unique({}, return_inverse=True)[1]";
  else if (one_hot)
    mended += ".argmax(1)";
  else
    mended += std::string(h.shape.size() == 1 ? "" : ".reshape(-1)") + (whole ? "" : ".astype('<i8')");
  file.mistaken("labels ", shape_of(h), " of type '", h.type,
                "', expected whole numbers [N]: ", again(file, mended, kind == 'O'), " makes them so");
}

void expect_pictures(const Header& h, const ByteSource& file) {
  const Shape shape = shape_of(h);
  const int rank = shape.rank();
  const char kind = kind_of(h);
  const bool bytes = h.type.size() == 3 && h.type.ends_with("u1"),
             square = rank >= 3 && rank <= 4 && shape[1] == shape[2];
  if ((bytes || (kind == 'f' && readable(h))) && square && (rank == 3 || shape[3] <= 4)) return;
  auto wrong = [&](const std::string& advice) {
    file.mistaken("pictures ", shape, " of type '", h.type, "', expected u1, or f4 from 0 to 1, of the shape ",
                  "[N, side, side] or [N, side, side, channels], at most 4 channels", advice);
  };
  if (kind == 'O') wrong(": " + again(file, "numpy.stack({})", true) + " makes pictures of one size so");
  if (!readable(h) && (kind == 'f' || kind == 'b')) wrong(": " + again(file, "{}.astype('<f4')") + " makes them so");
  if (kind != 'f' && !bytes) wrong(": where all are 0 to 255, " + again(file, "{}.astype('u1')") + " makes them so");
  if (rank == 4 && shape[1] <= 4 && shape[2] == shape[3])
    wrong(": " + again(file, "{}.transpose(0, 2, 3, 1)") + " puts the channels last");
  for (const int channels : {1, 3})
    if (rank == 2 && shape[1] % channels == 0) {
      const std::int64_t side = std::llround(std::sqrt(double(shape[1] / channels)));
      const std::string size = std::to_string(side);
      if (channels * side * side == shape[1])
        wrong(": " + again(file, "{}.reshape(-1, " + size + ", " + size + (channels == 3 ? ", 3)" : ")")) +
              " makes rows with the channels last so");
    }
  wrong("");
}

}  // namespace

void refuse_npz(const std::filesystem::path& path) {
  const std::string quoted = "'" + path.string() + "'";
  refuse(path.string(), ": its first bytes are those of an .npz archive, not \\x93NUMPY: a = numpy.load(", quoted,
         "); [numpy.save(name, a[name]) for name in a] writes each of its arrays as an .npy file");
}

namespace {

Tensor elements(ByteSource& file, const Header& h) {
  if (!readable(h))
    file.mistaken("elements of type '", h.type, "', expected little-endian u1 or f4, or whole numbers for labels: ",
                  again(file, kind_of(h) == 'f' ? "{}.astype('<f4')" : "{}.astype('<i8')"), " makes them so");
  const std::string type = h.type.substr(1);
  const std::uint64_t width = std::uint64_t(type[1] - '0');
  const Shape shape = shape_of(h);
  std::uint64_t numel = 1;
  for (std::uint64_t size : h.shape) {
    if (size > 0 && numel > UINT64_MAX / 16 / size) file.reject("its header announces too many elements");
    numel *= std::max<std::uint64_t>(1, size);
  }
  if (std::count(h.shape.begin(), h.shape.end(), 0)) numel = 0;
  const std::uint64_t total = h.before + numel * width;
  if (total > file.at_most())  // before memory is asked for
    file.reject("truncated, or its header ", shape, " is wrong: it holds at most ", file.at_most(), " bytes, expected ",
                total);
  if (type == "u1" || type == "f4") {
    Tensor t = host_tensor(shape, type == "u1" ? DType::u8 : DType::f32);
    file.read(t.raw_write(), numel * width, total);
    file.expect_end();
    return t;
  }
  std::vector<std::uint8_t> raw(numel * width);
  file.read(raw.data(), raw.size(), total);
  file.expect_end();
  Tensor t = host_tensor(shape, DType::i32);
  std::int32_t* to = t.write<std::int32_t>();
  const int sign = type[0] == 'i' ? 64 - 8 * int(width) : 0;
  for (std::uint64_t i = 0; i < numel; i++) {
    std::int64_t v = 0;
    std::memcpy(&v, raw.data() + i * width, width);
    v = v << sign >> sign;
    if (!std::in_range<std::int32_t>(v) || (type == "u8" && v < 0))
      file.mistaken("element ", i, " is ", v, ", expected at most 31 bits");
    to[i] = std::int32_t(v);
  }
  return t;
}

}  // namespace

Tensor read_npy(ByteSource& file) { return elements(file, header_of(file)); }

Pictures npy_pictures(const std::string& name, ByteSource& images, ByteSource& labels) {
  Pictures p;
  p.name = name;
  const Header about_labels = header_of(labels);  // the small file first: a mistake shows at once
  expect_labels(about_labels, labels);
  const Tensor y = elements(labels, about_labels);
  if (y.numel() == 0) labels.mistaken("it has no labels");
  const std::int64_t n = y.size(0);
  p.labels = host_tensor({n}, DType::i32);
  std::int32_t* to = p.labels.write<std::int32_t>();
  for (std::int64_t i = 0; i < n; i++) {
    to[i] = y.dtype() == DType::u8 ? y.data<std::uint8_t>()[i] : y.data<std::int32_t>()[i];
    if (to[i] < 0 || to[i] >= 1 << 20) labels.mistaken("label ", to[i], " at position ", i, ", expected 0, 1, 2, …");
  }
  p.classes = 1 + *std::max_element(to, to + n);

  const Header about_images = header_of(images);
  expect_pictures(about_images, images);
  const Tensor x = elements(images, about_images);
  if (x.numel() == 0) images.mistaken("it has no pictures");
  if (x.size(0) != n)
    images.mistaken(x.size(0), " pictures, expected ", n, " as there are labels in ", labels.path().string());
  const Shape shape = {n, x.size(1), x.size(2), x.rank() == 4 ? x.size(3) : 1};
  if (x.dtype() == DType::u8) {
    p.images = x.reshape(shape);
    return p;
  }
  p.images = host_tensor(shape, DType::u8);
  const float* from = x.data<float>();
  std::uint8_t* bytes = p.images.write<std::uint8_t>();
  for (std::int64_t i = 0; i < x.numel(); i++) {
    if (!(from[i] >= 0 && from[i] <= 1))
      images.mistaken("element ", i, " is ", from[i], ", expected 0 to 1",
                      from[i] > 1 && from[i] <= 255
                          ? "; where all are 0 to 255, " + again(images, "{}.astype('u1')") + " makes bytes of them"
                          : "");
    bytes[i] = std::uint8_t(std::lround(255 * from[i]));
  }
  return p;
}

Dataset npy_dataset(const std::filesystem::path& images) {
  const Advice advice("save the pictures there with numpy.save", "write it again with numpy.save");
  // NAME.npy → NAME_labels.npy, and x_NAME.npy → y_NAME.npy where the other is not there.
  auto labels_of = [](const std::filesystem::path& path) {
    const std::string stem = path.stem().string();
    const std::filesystem::path labels = path.parent_path() / (stem + "_labels.npy");
    if (std::filesystem::exists(labels) || !(stem.starts_with("x_") || stem.starts_with("X_"))) return labels;
    return path.parent_path() / std::string("y").append(stem, 1).append(".npy");
  };
  auto part = [&](const std::filesystem::path& path) {
    auto x = open_bytes(path, advice);
    auto y =
        open_bytes(labels_of(path), {"save the labels of " + path.string() + " there with numpy.save", advice.mend});
    return npy_pictures(plain_text(path.string()), *x, *y);
  };
  Pictures train = part(images);
  if (train.classes < 2) refuse(labels_of(images).string(), ": all labels are 0, expected at least two classes");
  std::vector<char> seen(std::size_t(train.classes), 0);
  for (std::int64_t i = 0; i < train.count(); i++) seen[std::size_t(train.labels.data<std::int32_t>()[i])] = 1;
  if (auto gap = std::find(seen.begin(), seen.end(), 0); gap != seen.end())
    refuse(labels_of(images).string(), ": no picture has the label ", gap - seen.begin(), ", the largest is ",
           train.classes - 1, ", expected 0, 1, 2, … without a gap: numpy.unique(labels, return_inverse=True)[1] ",
           "numbers them so");
  std::string name = images.filename().string();
  if (std::size_t at = name.find("train"); at != std::string::npos) {
    std::filesystem::path other = images.parent_path() / name.replace(at, 5, "test");
    if (std::filesystem::exists(other)) {
      Dataset d{images.string(), std::move(train), part(other)};
      Shape a = d.train.images.shape(), b = d.test.images.shape();
      b[0] = a[0];
      if (!(a == b))
        refuse(other.string(), ": pictures ", d.test.images.shape(), ", expected the shape of those in ",
               images.string(), ", ", a, ": write both alike");
      if (d.test.classes > d.train.classes)
        refuse(labels_of(other).string(), ": has the label ", d.test.classes - 1, ", and the largest of the training ",
               "pictures is ", d.train.classes - 1);
      d.test.classes = d.train.classes;
      measure(d);
      return d;
    }
  }
  return Dataset::of(train);
}

}  // namespace tandem
