#include "core/files/safetensors.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "core/backend.h"
#include "core/files/atomic_file.h"
#include "core/files/json.h"
#include "core/text.h"

namespace tandem {
namespace {

using Entry = SafetensorsFile::Entry;

constexpr std::uint64_t largest_header = 100'000'000;  // the limit of the format
constexpr const char* again = "; it is damaged or incomplete: get it, or write it, again";

template <class T>
std::vector<double> decoded(const std::vector<std::byte>& bytes) {
  std::vector<double> v(bytes.size() / sizeof(T));
  for (std::size_t i = 0; i < v.size(); i++) {
    T element;
    std::memcpy(&element, bytes.data() + i * sizeof(T), sizeof(T));
    v[i] = double(element);
  }
  return v;
}

// A type of the format: the bytes of one element, and the function that decodes values; null: not supported.
struct FileType {
  std::uint64_t bytes = 0;
  std::vector<double> (*values)(const std::vector<std::byte>&) = nullptr;
};
FileType type_named(const std::string& dtype) {  // bytes = 0: it is unknown or narrower than a byte
  static const std::map<std::string, FileType> types{{"BOOL", {1, decoded<std::uint8_t>}},
                                                     {"U8", {1, decoded<std::uint8_t>}},
                                                     {"I8", {1, decoded<std::int8_t>}},
                                                     {"F8_E5M2", {1}},
                                                     {"F8_E4M3", {1}},
                                                     {"F8_E8M0", {1}},
                                                     {"I16", {2, decoded<std::int16_t>}},
                                                     {"U16", {2, decoded<std::uint16_t>}},
                                                     {"F16", {2, decoded<f16>}},
                                                     {"BF16", {2, decoded<bf16>}},
                                                     {"I32", {4, decoded<std::int32_t>}},
                                                     {"U32", {4, decoded<std::uint32_t>}},
                                                     {"F32", {4, decoded<float>}},
                                                     {"C64", {8}},
                                                     {"F64", {8, decoded<double>}},
                                                     {"I64", {8, decoded<std::int64_t>}},
                                                     {"U64", {8, decoded<std::uint64_t>}}};
  const auto found = types.find(dtype);
  return found == types.end() ? FileType{} : found->second;
}

std::string file_type(DType t) {  // f32: "F32"
  std::string name = name_of(t);
  for (char& c : name) c = static_cast<char>(std::toupper(c));
  return name;
}

using Json = nlohmann::ordered_json;

Json parse_header(const std::string& file, const std::string& text) {
  try {
    return parse_json(text);
  } catch (const JsonError& e) {
    refuse(file, ": its header is not JSON that the format allows (", e.what(), ")", again);
  }
}

// Numbers are compared as doubles: exact up to 2⁵³, which is more bytes than any file has.
bool whole(const Json& j) { return j.is_number() && j.get<double>() >= 0 && std::fmod(j.get<double>(), 1) == 0; }

Entry parse_entry(const std::string& file, const std::string& name, const Json& j) {
  auto no = [&](const auto&... why) { refuse(file, ": ", name, ": ", why..., again); };
  if (!j.is_object()) no("is not described by an object");
  for (const char* key : {"dtype", "shape", "data_offsets"})
    if (!j.contains(key)) no("has no ", key);
  const Json &axes = j["shape"], &offsets = j["data_offsets"];
  if (!j["dtype"].is_string()) no("its dtype is not a string");
  if (!axes.is_array()) no("its shape is not a list");
  const auto dtype = j["dtype"].get<std::string>();
  Entry e;
  e.dtype = dtype;
  const std::uint64_t size = type_named(dtype).bytes;
  if (size == 0) refuse(file, ": ", name, " has the type ", dtype, ", which is not supported; convert it to F32");
  if (axes.size() > Shape::max_rank)
    refuse(file, ": ", name, " has ", axes.size(), " axes; tensors here have at most ", Shape::max_rank);
  std::uint64_t bytes = size;
  for (const Json& axis : axes) {
    if (!whole(axis)) no("its shape holds something that is not a whole number");
    const auto length = axis.get<double>();
    if (length > 0x1p53 || __builtin_mul_overflow(bytes, std::uint64_t(length), &bytes) ||
        bytes > std::uint64_t(INT64_MAX))
      no("its shape is larger than any memory");
    e.shape.append(std::int64_t(length));
  }
  if (!offsets.is_array() || offsets.size() != 2 || !whole(offsets[0]) || !whole(offsets[1]))
    no("its data_offsets are not two whole numbers");
  const auto begin = offsets[0].get<double>(), end = offsets[1].get<double>();
  if (end > 0x1p53 || end - begin != double(bytes))
    no("its data_offsets hold ", end - begin, " bytes, not the ", bytes, " of ", dtype, " ", e.shape);
  e.begin = std::uint64_t(begin);
  e.end = e.begin + bytes;
  return e;
}

// A command that converts a file of torch.save() to safetensors; it needs only torch. A training checkpoint also has
// other values; its state_dict is the dictionary with the most tensors.
std::string conversion(const std::filesystem::path& path) {
  return R"(  python3 -c '
import json, struct, sys, torch
w = torch.load(sys.argv[1], map_location="cpu")
def dicts(v):
    v = v.state_dict() if isinstance(v, torch.nn.Module) else v
    if isinstance(v, dict):
        yield {str(k): t.detach().float().contiguous() for k, t in v.items() if torch.is_tensor(t) and t.is_floating_point()}
        for inner in v.values():
            yield from dicts(inner)
w = max(dicts(w), key=len, default={})
if not w: sys.exit(sys.argv[1] + " holds no tensors by name")
header, at = {}, 0
for k, v in w.items():
    header[k] = {"dtype": "F32", "shape": list(v.shape), "data_offsets": [at, at + 4 * v.numel()]}
    at += 4 * v.numel()
text = json.dumps(header).encode()
open(sys.argv[2], "wb").write(struct.pack("<Q", len(text)) + text + b"".join(v.numpy().tobytes() for v in w.values()))
' )" + shell_quoted(path.string()) +
         " " + shell_quoted(path.stem().string() + ".safetensors");
}

// The first bytes of a file of torch.save(): a zip archive, or a plain pickle.
bool is_pickle(const unsigned char* head) {
  return std::memcmp(head, "PK\x03\x04", 4) == 0 || (head[0] == 0x80 && head[1] >= 2 && head[1] <= 5);
}

}  // namespace

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path)
    : path_(path), file_(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {  // does not block on a pipe
  const std::string file = path.string();
  if (file_.number < 0) refuse(file, ": cannot be opened: ", std::strerror(errno));
  struct stat status {};
  if (fstat(file_.number, &status) != 0 || !S_ISREG(status.st_mode))
    refuse(file, ": is ", S_ISDIR(status.st_mode) ? "a folder" : "not a regular file", ", expected a safetensors file");
  const auto size = static_cast<std::uint64_t>(status.st_size);
  const Json header = parse_header(file, header_text(size));
  for (const auto& [name, entry] : header.items()) {
    if (name != "__metadata__") {
      tensors_[name] = parse_entry(file, name, entry);
      continue;
    }
    if (!entry.is_object()) refuse(file, ": its __metadata__ is not a dictionary", again);
    for (const auto& [key, value] : entry.items()) {
      if (!value.is_string()) refuse(file, ": its __metadata__ holds ", key, ", which is not a string", again);
      metadata_[key] = value.get<std::string>();
    }
  }
  check_layout(size - data_);
}

std::string SafetensorsFile::header_text(std::uint64_t size) {
  const std::string file = path_.string();
  auto read_at = [&](void* to, std::uint64_t count, std::uint64_t from) {
    data_ = from;
    read_bytes("its header", {.dtype = "U8", .shape = {}, .begin = 0, .end = count}, to);
  };
  unsigned char head[8] = {};
  if (size < sizeof head)
    refuse(file, ": ", size ? "has only " + std::to_string(size) + " bytes" : "is empty", ", not a safetensors file",
           again);
  read_at(head, sizeof head, 0);
  std::uint64_t length;
  std::memcpy(&length, head, sizeof length);
  const bool fits = length <= largest_header && length <= size - sizeof head;
  if (!fits && is_pickle(head))  // not tested first: a header of 640 bytes begins like a pickle
    refuse(file,
           ": is PyTorch's own format (pickle, which can run code), not safetensors. If you trust it, convert it:\n",
           conversion(path_));
  if (!fits)
    refuse(file, ": its first 8 bytes give a header of ", length, " bytes and the file has ", size,
           "; it is not a safetensors file, or it was cut off");
  std::string text(length, '\0');
  read_at(text.data(), length, sizeof head);
  if (text.empty() || text[0] != '{') refuse(file, ": its header does not begin with {", again);
  data_ = sizeof head + length;
  return text;
}

// Checks that the tensors cover all bytes without gaps and without overlaps.
void SafetensorsFile::check_layout(std::uint64_t data_bytes) const {
  const std::string file = path_.string();
  std::vector<const std::pair<const std::string, Entry>*> order;
  for (const auto& named : tensors_) order.push_back(&named);
  std::ranges::sort(order, {}, [](auto* named) { return std::pair(named->second.begin, named->second.end); });
  std::uint64_t at = 0;
  for (const auto* named : order) {
    const auto& [name, e] = *named;
    if (e.begin != at)
      refuse(file, ": ", name, " begins at byte ", e.begin, " where ", at,
             " was expected: ", e.begin < at ? "it overlaps another tensor" : "there is a hole before it", again);
    at = e.end;
  }
  if (at != data_bytes)
    refuse(file, ": its header describes ", at, " bytes of elements and the file holds ", data_bytes,
           at > data_bytes ? "; it was cut off: get it, or write it, again" : again);
}

const Entry& SafetensorsFile::at(const std::string& name) const {
  auto found = tensors_.find(name);
  if (found == tensors_.end()) refuse(path_.string(), ": holds no tensor ", name);
  return found->second;
}

void SafetensorsFile::read_bytes(const std::string& name, const Entry& e, void* to) const {
  char* into = static_cast<char*>(to);
  std::uint64_t from = data_ + e.begin, left = e.bytes();
  while (left > 0) {
    const ssize_t got = pread(file_.number, into, std::min<std::uint64_t>(left, 1 << 30), static_cast<off_t>(from));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0)
      refuse(path_.string(), ": ", name,
             " cannot be read: ", got < 0 ? std::strerror(errno) : "the file became shorter");
    into += got;
    from += std::uint64_t(got);
    left -= std::uint64_t(got);
  }
}

std::vector<std::byte> SafetensorsFile::bytes(const std::string& name) const {
  const Entry& e = at(name);
  std::vector<std::byte> b(e.bytes());
  read_bytes(name, e, b.data());
  return b;
}

std::vector<double> SafetensorsFile::values(const std::string& name) const {
  const std::string& type = at(name).dtype;
  const FileType known = type_named(type);
  if (!known.values)
    refuse(path_.string(), ": ", name, " has the type ", type, ", which is not supported; convert it to F32");
  return known.values(bytes(name));
}

Tensor SafetensorsFile::tensor(const std::string& name, Backend& backend, DType dtype) const {
  Tensor t(backend, at(name).shape, dtype);
  read(name, t);
  return t;
}

void SafetensorsFile::read(const std::string& name, Tensor& into) const {
  const Entry& e = at(name);
  if (e.shape != into.shape())
    refuse(path_.string(), ": ", name, " has the shape ", e.shape, ", expected ", into.shape());
  read_part(name, 0, into);
}

void SafetensorsFile::read_part(const std::string& name, std::int64_t from, Tensor& into) const {
  Entry e = at(name);
  if (from < 0 || from + into.numel() > e.shape.numel())
    refuse(path_.string(), ": ", name, " has ", e.shape.numel(), " elements, expected ", from + into.numel());
  if (into.numel() == 0) return;
  const std::uint64_t each = e.bytes() / std::uint64_t(e.shape.numel());
  e.begin += std::uint64_t(from) * each;
  e.end = e.begin + std::uint64_t(into.numel()) * each;
  const bool integers = into.dtype() == DType::u8 || into.dtype() == DType::i32;
  const bool same = e.dtype == file_type(into.dtype()) || (e.dtype == "BOOL" && into.dtype() == DType::u8);
  if (!same && integers)
    refuse(path_.string(), ": ", name, " has the type ", e.dtype, ", expected ", file_type(into.dtype()));
  if (!same) {
    const std::vector<double> all = values(name);
    into.copy_from(Tensor::of(into.backend(), into.shape(),
                              std::span(all).subspan(std::size_t(from), std::size_t(into.numel())), into.dtype()));
  } else if (!into.backend().on_device())
    read_bytes(name, e, into.raw_write());
  else {
    std::vector<std::byte> host(e.bytes());
    read_bytes(name, e, host.data());
    into.backend().upload(into.raw_write(), host.data(), host.size());
  }
}

void SafetensorsWriter::add(std::string name, Item item) {
  require(items_.count(name) == 0 && name != "__metadata__", "a safetensors file cannot hold ", name, " twice");
  items_[std::move(name)] = std::move(item);
}

void SafetensorsWriter::add(std::string name, const Tensor& tensor) {
  add(std::move(name), Item{file_type(tensor.dtype()), tensor.shape(), tensor, {}});
}

void SafetensorsWriter::add(std::string name, std::string dtype, const Shape& shape, std::span<const std::byte> bytes) {
  const std::uint64_t size = type_named(dtype).bytes;
  require(size > 0 && bytes.size() == std::uint64_t(shape.numel()) * size, name, ": ", bytes.size(), " bytes for ",
          shape, " of ", dtype);
  add(std::move(name), Item{std::move(dtype), shape, {}, bytes});
}

void SafetensorsWriter::write(const std::filesystem::path& path) const {
  // Wide types first, then by name, like the reference writer: every tensor begins at a multiple of its element size.
  std::vector<const std::pair<const std::string, Item>*> order;
  for (const auto& named : items_) order.push_back(&named);
  std::ranges::stable_sort(order, std::greater(), [](auto* named) { return type_named(named->second.dtype).bytes; });
  Json header = Json::object();
  if (!metadata_.empty()) header["__metadata__"] = metadata_;
  std::uint64_t at = 0;
  for (const auto* named : order) {
    const auto& [name, item] = *named;
    const std::uint64_t bytes = std::uint64_t(item.shape.numel()) * type_named(item.dtype).bytes;
    header[name] = {{"dtype", item.dtype},
                    {"shape", std::vector<std::int64_t>(item.shape.begin(), item.shape.end())},
                    {"data_offsets", {at, at + bytes}}};
    at += bytes;
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const Json::type_error&) {
    fail(path.string(),
         ": a name or a metadata string is not UTF-8: ", header.dump(-1, ' ', false, Json::error_handler_t::replace));
  }
  text.resize((text.size() + 7) / 8 * 8, ' ');
  require(text.size() <= largest_header, path.string(), ": names and metadata are longer than the format allows");

  AtomicFile file(path);
  const std::uint64_t length = text.size();
  file.write(&length, sizeof length);
  file.write(text.data(), text.size());
  for (const auto* named : order) {
    const Item& item = named->second;
    if (!item.tensor.defined())
      file.write(item.bytes.data(), item.bytes.size());
    else if (!item.tensor.backend().on_device())
      file.write(item.tensor.raw(), item.tensor.bytes());
    else {
      std::vector<std::byte> host(item.tensor.bytes());
      item.tensor.backend().download(host.data(), item.tensor.raw(), host.size());
      file.write(host.data(), host.size());
    }
  }
  file.commit();
}

}  // namespace tandem
