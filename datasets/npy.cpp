#include "datasets/npy.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

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
};

// The line that writes the array again, as another one.
std::string again(const ByteSource& file, const std::string& changed) {
  const std::string path = "'" + file.path().string() + "'";
  const bool around = changed.starts_with("numpy.");
  const std::string loaded = "numpy.load(" + path + ")";
  return "numpy.save(" + path + ", " + (around ? changed + "(" + loaded + ")" : loaded + changed) + ")";
}

class HeaderText {
 public:
  HeaderText(const std::string& text, const ByteSource& file) : text_(text), file_(file) {}

  Header parse() {
    Header h;
    int seen = 0;
    expect('{');
    while (!accept('}')) {
      std::string key = quoted();
      expect(':');
      if (key == "descr") {
        h.type = quoted();
        seen |= 1;
      } else if (key == "fortran_order") {
        if (word("True"))
          h.fortran = true;
        else if (!word("False"))
          wrong("True or False");
        seen |= 2;
      } else if (key == "shape") {
        tuple(h.shape);
        seen |= 4;
      } else {
        wrong("descr, fortran_order or shape as a key");
      }
      if (!accept(',')) {
        expect('}');
        break;
      }
    }
    skip();
    if (at_ < text_.size()) wrong("nothing after the header's }");
    if (seen != 7) wrong("descr, fortran_order and shape");
    return h;
  }

 private:
  [[noreturn]] void wrong(const char* expected) {
    file_.mistaken("at byte ", at_, " of its header's text, expected ", expected, "; where NumPy reads it, ",
                   again(file_, ""), " writes a header of today");
  }
  void skip() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n')) at_++;
  }
  bool accept(char c) {
    skip();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    at_++;
    return true;
  }
  void expect(char c) {
    const char what[] = {c, 0};
    if (!accept(c)) wrong(what);
  }
  bool word(const std::string& w) {
    skip();
    if (text_.compare(at_, w.size(), w) != 0) return false;
    at_ += w.size();
    return true;
  }
  std::string quoted() {
    skip();
    char quote = at_ < text_.size() ? text_[at_] : 0;
    std::size_t end = quote == '\'' || quote == '"' ? text_.find(quote, at_ + 1) : std::string::npos;
    if (end == std::string::npos) wrong("a string in quotes (arrays of structures are not read)");
    std::string s = text_.substr(at_ + 1, end - at_ - 1);
    at_ = end + 1;
    return s;
  }
  void tuple(std::vector<std::uint64_t>& values) {
    expect('(');
    while (!accept(')')) {
      skip();
      std::size_t begin = at_;
      std::uint64_t v = 0;
      for (; at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9'; at_++) {
        if (v > (std::uint64_t{1} << 62) / 10) wrong("a smaller size");
        v = 10 * v + std::uint64_t(text_[at_] - '0');
      }
      if (at_ == begin) wrong("a number");
      values.push_back(v);
      if (!accept(',')) {
        expect(')');
        break;
      }
    }
  }

  const std::string& text_;
  const ByteSource& file_;
  std::size_t at_ = 0;
};

// Whole numbers of type S, as the file has them, into i32.
template <class S>
void narrow(const ByteSource& file, const std::vector<std::uint8_t>& raw, Tensor& to) {
  std::int32_t* out = to.write<std::int32_t>();
  for (std::int64_t i = 0; i < to.numel(); i++) {
    S v;
    std::memcpy(&v, raw.data() + i * std::int64_t(sizeof v), sizeof v);
    if (!std::in_range<std::int32_t>(v)) file.mistaken("element ", i, " is ", +v, ", expected at most 31 bits");
    out[i] = std::int32_t(v);
  }
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

// "f4" of "<f4"; what is not read is refused.
std::string element_type(const Header& h, const ByteSource& file) {
  const std::string type = h.type.size() == 3 ? h.type.substr(1) : "";
  const char order = h.type.empty() ? ' ' : h.type[0];
  const std::string kinds = "u1 f4 i1 u2 i2 u4 i4 u8 i8";
  if (type.size() != 2 || kinds.find(type) == std::string::npos || type[0] == ' ' || type[1] == ' ' ||
      (order == '>' && type[1] != '1') || !std::strchr("<>|=", order))
    file.mistaken("elements of type '", h.type, "', expected little-endian u1 or f4, or whole numbers for labels: ",
                  again(file, type.starts_with('f') ? ".astype('<f4')"
                              : type == "b1"        ? ".astype('u1')"
                                                    : ".astype('<i8')"),
                  " makes them so");
  return type;
}

}  // namespace

void refuse_npz(const std::filesystem::path& path) {
  const std::string quoted = "'" + path.string() + "'";
  refuse(path.string(), ": its first bytes are those of an .npz archive, not \\x93NUMPY: a = numpy.load(", quoted,
         "); [numpy.save(name, a[name]) for name in a] writes each of its arrays as an .npy file");
}

Tensor read_npy(ByteSource& file) {
  const auto [text, before] = header_text(file);
  const Header h = HeaderText(text, file).parse();
  if (h.fortran)
    file.mistaken("its array is in Fortran order, expected C order: ", again(file, "numpy.ascontiguousarray"),
                  " makes it so");
  if (h.shape.size() > std::size_t(Shape::max_rank)) file.mistaken(h.shape.size(), " axes, expected at most six");
  const std::string type = element_type(h, file);
  const std::uint64_t width = std::uint64_t(type[1] - '0');
  Shape shape;
  std::uint64_t numel = 1;
  bool empty = false;
  for (std::uint64_t size : h.shape) {
    shape.append(std::int64_t(size));
    empty |= size == 0;
    if (size > 0 && numel > UINT64_MAX / 16 / size) file.reject("its header announces too many elements");
    if (size > 0) numel *= size;
  }
  if (empty) numel = 0;
  const std::uint64_t total = before + numel * width;
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
  if (type == "i1") narrow<std::int8_t>(file, raw, t);
  if (type == "u2") narrow<std::uint16_t>(file, raw, t);
  if (type == "i2") narrow<std::int16_t>(file, raw, t);
  if (type == "u4") narrow<std::uint32_t>(file, raw, t);
  if (type == "i4") narrow<std::int32_t>(file, raw, t);
  if (type == "u8") narrow<std::uint64_t>(file, raw, t);
  if (type == "i8") narrow<std::int64_t>(file, raw, t);
  return t;
}

Pictures npy_pictures(const std::string& name, ByteSource& images, ByteSource& labels) {
  Pictures p;
  p.name = name;
  Tensor y = read_npy(labels);  // the small file first: a mistake shows at once
  if (y.rank() != 1 || y.dtype() == DType::f32 || y.numel() == 0)
    labels.mistaken("labels ", y.shape(), " of type ", name_of(y.dtype()), ", expected whole numbers [N]");
  const std::int64_t n = y.size(0);
  p.labels = host_tensor({n}, DType::i32);
  std::int32_t* to = p.labels.write<std::int32_t>();
  for (std::int64_t i = 0; i < n; i++) {
    to[i] = y.dtype() == DType::u8 ? y.data<std::uint8_t>()[i] : y.data<std::int32_t>()[i];
    if (to[i] < 0 || to[i] >= 1 << 20) labels.mistaken("label ", to[i], " at position ", i, ", expected 0, 1, 2, …");
  }
  p.classes = 1 + *std::max_element(to, to + n);

  Tensor x = read_npy(images);
  if (x.dtype() == DType::i32 || x.rank() < 3 || x.rank() > 4 || x.numel() == 0 || x.size(1) != x.size(2) ||
      (x.rank() == 4 && x.size(3) > 4))
    images.mistaken(
        "pictures ", x.shape(), " of type ", name_of(x.dtype()),
        ", expected u8 or f32 of the shape [N, side, side] or [N, side, side, channels], at most 4 channels");
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
    if (!(from[i] >= 0 && from[i] <= 1)) images.mistaken("element ", i, " is ", from[i], ", expected 0 to 1");
    bytes[i] = std::uint8_t(std::lround(255 * from[i]));
  }
  return p;
}

Dataset npy_dataset(const std::filesystem::path& images) {
  const Advice advice("save the pictures there with numpy.save", "write it again with numpy.save");
  // NAME.npy → NAME_labels.npy, and x_NAME.npy → y_NAME.npy where that is there.
  auto labels_of = [](const std::filesystem::path& path) {
    std::string stem = path.stem().string();
    if (stem.starts_with("x_") || stem.starts_with("X_")) {
      std::filesystem::path y = path.parent_path() / std::string("y").append(stem, 1).append(".npy");
      if (std::filesystem::exists(y)) return y;
    }
    return path.parent_path() / (stem + "_labels.npy");
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
