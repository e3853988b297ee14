// safetensors files: named tensors and a dictionary of strings, without executable code. PyTorch, JAX and others use
// this format to exchange weights; our checkpoints have it, too.
//
//   u64 N | N bytes of JSON: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, …} | the elements
//
// Little-endian and row-major.
#pragma once
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "core/files/files.h"
#include "core/tensor.h"

namespace tandem {

// A file that was opened and checked: the header is within its bounds, names are unique, every shape agrees with its
// number of bytes, and the tensors fill the file without gaps. A damaged file throws UsageError, which names the
// defect. A PyTorch file (pickle) throws UsageError with a command that converts the file. Elements are read when they
// are requested.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);

  struct Entry {
    std::string dtype;                 // as in the file: F64 F32 F16 BF16 I64 … BOOL
    Shape shape;                       // up to six axes
    std::uint64_t begin = 0, end = 0;  // bytes from the first element of the file
    std::uint64_t bytes() const { return end - begin; }
  };
  const std::filesystem::path& path() const { return path_; }
  const std::map<std::string, Entry>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  bool has(const std::string& name) const { return tensors_.count(name) != 0; }
  const Entry& at(const std::string& name) const;  // throws UsageError when there is no such tensor

  std::vector<std::byte> bytes(const std::string& name) const;  // as they are in the file
  std::vector<double> values(const std::string& name) const;    // any type but 8-bit floats and C64
  // A new tensor on this backend, with its elements converted to `dtype`.
  Tensor tensor(const std::string& name, Backend& backend, DType dtype = DType::f32) const;
  // Reads into an existing tensor of the same shape. Elements of the same type are copied bit for bit. Other types are
  // converted, but only to a floating type.
  void read(const std::string& name, Tensor& into) const;
  // The same for a part of a tensor: its elements [from, from + into.numel()).
  void read_part(const std::string& name, std::int64_t from, Tensor& into) const;

 private:
  std::string header_text(std::uint64_t size);  // checked against the file's size
  void check_layout(std::uint64_t data_bytes) const;
  void read_bytes(const std::string& name, const Entry& e, void* to) const;
  std::filesystem::path path_;
  FileDescriptor file_;
  std::uint64_t data_ = 0;  // where the elements begin in the file
  std::map<std::string, Entry> tensors_;
  std::map<std::string, std::string> metadata_;
};

// Collects tensors, then writes them all: the old file stays until the new one is complete (core/files/atomic_file.h).
class SafetensorsWriter {
 public:
  // The elements are read from the device when write() runs. Throws Error when the name was added before.
  void add(std::string name, const Tensor& tensor);
  // For types that Tensor does not have. The bytes are not copied: they must live until write().
  void add(std::string name, std::string dtype, const Shape& shape, std::span<const std::byte> bytes);
  void metadata(std::string key, std::string value) { metadata_[std::move(key)] = std::move(value); }
  // Throws UsageError when the file cannot be made, Error when the disk is full.
  void write(const std::filesystem::path& path) const;

 private:
  struct Item {
    std::string dtype;
    Shape shape;
    Tensor tensor;  // undefined: `bytes` has the elements
    std::span<const std::byte> bytes;
  };
  void add(std::string name, Item item);
  std::map<std::string, Item> items_;
  std::map<std::string, std::string> metadata_;
};

}  // namespace tandem
