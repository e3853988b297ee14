// Reading a file of bytes, plain or compressed, with errors that say what was found, what was expected and what to do.
#pragma once
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "core/error.h"

namespace tandem {

// A file read from its beginning to its end. `source` says how to get it, "run datasets/get-data.sh cifar-10 data": it
// closes every error that a new copy would mend.
class ByteSource {
 public:
  ByteSource(std::filesystem::path path, std::string source) : path_(std::move(path)), source_(std::move(source)) {}
  virtual ~ByteSource() = default;

  // Exactly `bytes` bytes, or an Error "truncated after …, expected `total`".
  void read(void* to, std::size_t bytes, std::uint64_t total);
  // Throws when there are bytes left, or when the checksum that ends a compressed file is missing or wrong.
  void expect_end();
  // No more than this many bytes can be in there: whether a header's promise is worth allocating memory for.
  virtual std::uint64_t at_most() const = 0;

  // What the file holds is wrong: "truncated after 4 bytes, expected 16".
  template <class... Parts>
  [[noreturn]] void reject(const Parts&... parts) const {
    refuse(path_.string(), ": is damaged (", parts..., "): delete it and ", source_);
  }

 protected:
  virtual std::size_t read_some(void* to, std::size_t bytes) = 0;  // fewer than asked only at the end
  virtual void check_end() {}
  [[noreturn]] void unreadable(const char* what) const;  // with the reason in errno: a new copy would not help
  std::filesystem::path path_;
  std::string source_;

 private:
  std::uint64_t position_ = 0;
};

// A name that ends in .gz is decompressed. Throws when there is no such file, or when it is not a file.
std::unique_ptr<ByteSource> open_bytes(const std::filesystem::path& path, const std::string& source);

}  // namespace tandem
