// The bytes of a plain or compressed file, in memory. All format readers take a ByteSource, so that tests can pass them
// any bytes. Error messages state the path, the actual content, the expected content and the remedy.
#pragma once
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "core/tensor.h"

namespace tandem {

// Bytes read from their beginning to their end.
class ByteSource {
 public:
  // `remedy` ends the error messages; it says how to get the file: "run datasets/get-data.sh cifar-10 data".
  ByteSource(std::filesystem::path path, std::string remedy, std::vector<std::uint8_t> bytes)
      : path_(std::move(path)), remedy_(std::move(remedy)), bytes_(std::move(bytes)) {}

  // The next `bytes` bytes; throws Error "truncated after …, expected …" when the file has fewer.
  const std::uint8_t* read(std::size_t bytes);
  // Reads the array that ends the file into host memory.
  Tensor read_array(const Shape& shape, DType dtype);
  // Throws when the file does not hold the array that its header announces, before memory is allocated for it: the
  // header may be damaged. `width`: bytes of an element.
  void expect_array(const Shape& shape, std::size_t width) const;
  void expect_end() const;  // throws when there are bytes left
  // Returns class numbers [N] of any integer type as i32 [N]. Throws for a number that is not in [0, classes).
  Tensor classes_in(const Tensor& numbers, int classes = 1 << 20) const;

  const std::vector<std::uint8_t>& all() const { return bytes_; }
  const std::filesystem::path& path() const { return path_; }
  const std::string& remedy() const { return remedy_; }

  // For wrong contents of the file: "truncated after 4 bytes, expected 16".
  template <class... Parts>
  [[noreturn]] void reject(const Parts&... parts) const {
    refuse(path_.string(), ": is damaged (", parts..., "): move it away and ", remedy_);
  }
  // For a file that is complete, but is not of the expected kind.
  template <class... Parts>
  [[noreturn]] void mistaken(const Parts&... parts) const {
    refuse(path_.string(), ": is another file (", parts..., "): move it away and ", remedy_);
  }

 private:
  std::filesystem::path path_;
  std::string remedy_;
  std::vector<std::uint8_t> bytes_;
  std::size_t position_ = 0;
};

// Reads a file. One that begins like a gzip file is decompressed, regardless of its name. Throws when there is no such
// file, or when the path is not a file. `promise` computes the size of the decompressed file from its beginning. A
// compressed file that holds more is refused before all of it is decompressed.
using Promise = double (*)(std::span<const std::uint8_t> beginning);
ByteSource open_bytes(const std::filesystem::path& path, const std::string& remedy, Promise promise = nullptr);

// The decompressed bytes of a gzip file; throws when they are damaged, or when the file does not end after them.
// gzip.cpp (zlib) or, where there is no zlib, gzip_none.cpp is linked.
ByteSource gunzip(const ByteSource& compressed, Promise promise = nullptr);

}  // namespace tandem
