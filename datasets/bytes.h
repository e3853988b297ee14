// Reads bytes from a plain or compressed file. Error messages state the actual content, the expected content and the
// remedy. All format readers take a ByteSource, so that tests can pass them any bytes.
#pragma once
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "core/error.h"

namespace tandem {

// The advice in a file's error messages. `source` is how to get the file, "run datasets/get-data.sh cifar-10 data".
// `mend` is the remedy for wrong contents: to move the file away and get it again, unless it is the user's own work.
struct Advice {
  Advice(std::string from) : source(std::move(from)), mend("move it away and " + source) {}
  Advice(const char* from) : Advice(std::string(from)) {}
  Advice(std::string from, std::string otherwise) : source(std::move(from)), mend(std::move(otherwise)) {}
  std::string source, mend;
};

// Bytes read from their beginning to their end.
class ByteSource {
 public:
  ByteSource(std::filesystem::path path, Advice advice) : path_(std::move(path)), advice_(std::move(advice)) {}
  virtual ~ByteSource() = default;

  // Reads exactly `bytes` bytes, or throws Error "truncated after …, expected `total`".
  void read(void* to, std::size_t bytes, std::uint64_t total);
  // Reads all remaining bytes.
  std::vector<std::uint8_t> read_all();
  // Throws when there are bytes left, or when the checksum that ends a compressed file is missing or wrong.
  void expect_end();
  // An upper bound on the number of bytes. Compare it with the size in a header before allocating memory.
  virtual std::uint64_t at_most() const = 0;
  virtual std::size_t read_some(void* to, std::size_t bytes) = 0;  // fewer than asked only at the end

  const std::filesystem::path& path() const { return path_; }
  const Advice& advice() const { return advice_; }

  // For wrong contents of the file: "truncated after 4 bytes, expected 16".
  template <class... Parts>
  [[noreturn]] void reject(const Parts&... parts) const {
    refuse(path_.string(), ": is damaged (", parts..., "): ", advice_.mend);
  }
  // For a file that is complete, but is not of the expected kind.
  template <class... Parts>
  [[noreturn]] void mistaken(const Parts&... parts) const {
    refuse(path_.string(), ": is another file (", parts..., "): ", advice_.mend);
  }

 protected:
  virtual void check_end() {}
  [[noreturn]] void unreadable(const char* what) const;  // with the reason in errno; a new copy would not help

 private:
  std::filesystem::path path_;
  Advice advice_;
  std::uint64_t position_ = 0;
};

// A file that begins like a gzip file is decompressed, regardless of its name. Throws when there is no such file, or
// when the path is not a file.
std::unique_ptr<ByteSource> open_bytes(const std::filesystem::path& path, const Advice& advice);

// A file in the folder of `path` whose name has the same letters and digits except one or two at its end:
// train-images.idx3-ubyte, "train-images-idx3-ubyte (1).gz". Empty: there is no such file.
std::filesystem::path similar_file(const std::filesystem::path& path);

}  // namespace tandem
