// Reads bytes from a plain or compressed file. All format readers take a ByteSource, so that tests can pass them any
// bytes. Error messages state the path, the actual content, the expected content and the remedy.
#pragma once
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "core/tensor.h"

namespace tandem {

// Bytes read from their beginning to their end.
class ByteSource {
 public:
  // `remedy` ends the error messages; it says how to get the file: "run datasets/get-data.sh cifar-10 data".
  ByteSource(std::filesystem::path path, std::string remedy) : path_(std::move(path)), remedy_(std::move(remedy)) {}
  virtual ~ByteSource() = default;

  // Reads exactly `bytes` bytes, or throws Error "truncated after …, expected `total`"; 0: the bytes read so far.
  void read(void* to, std::size_t bytes, std::uint64_t total = 0);
  // Reads the array that ends the file into host memory.
  Tensor read_array(const Shape& shape, DType dtype);
  // Throws when the file cannot hold the array that its header announces, before memory is allocated for it: the header
  // may be damaged. `width`: bytes of an element.
  void expect_array(const Shape& shape, std::size_t width) const;
  // Reads all remaining bytes.
  std::vector<std::uint8_t> read_all();
  // Throws when there are bytes left, or when the checksum that ends a compressed file is missing or wrong.
  void expect_end();
  virtual std::uint64_t at_most() const = 0;                       // an upper bound on the number of bytes
  virtual std::size_t read_some(void* to, std::size_t bytes) = 0;  // fewer than asked only at the end

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

 protected:
  virtual void check_end() {}

 private:
  std::filesystem::path path_;
  std::string remedy_;
  std::uint64_t position_ = 0;
};

// A file that begins like a gzip file is decompressed, regardless of its name. Throws when there is no such file, or
// when the path is not a file.
std::unique_ptr<ByteSource> open_bytes(const std::filesystem::path& path, const std::string& remedy);

// The decompressed bytes of a gzip file, whose path and remedy are used in error messages. gzip.cpp (zlib) or, where
// there is no zlib, gzip_none.cpp is linked.
std::unique_ptr<ByteSource> gunzip(std::unique_ptr<ByteSource> compressed);

}  // namespace tandem
