// Reading a file of bytes, plain or compressed, with errors that say what was found, what was expected and what to do.
#pragma once
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "core/error.h"

namespace tandem {

// A file read from its beginning to its end. `mend` closes every error: "delete it and run
// datasets/get-data.sh cifar-10".
class ByteSource {
 public:
  ByteSource(std::filesystem::path path, std::string mend) : path_(std::move(path)), mend_(std::move(mend)) {}
  virtual ~ByteSource() = default;

  // Exactly `bytes` bytes, or an Error "truncated after …, expected `total`".
  void read(void* to, std::size_t bytes, std::uint64_t total);
  // Throws when there are bytes left, or when the checksum that ends a compressed file is missing or wrong.
  void expect_end();
  // No more than this many bytes can be in there: whether a header's promise is worth allocating memory for.
  virtual std::uint64_t at_most() const = 0;

  template <class... Parts>
  [[noreturn]] void reject(const Parts&... parts) const { refuse(path_.string(), ": ", parts..., ": ", mend_); }

 protected:
  virtual std::size_t read_some(void* to, std::size_t bytes) = 0;  // fewer than asked only at the end
  virtual void check_end() {}
  std::filesystem::path path_;
  std::string mend_;

 private:
  std::uint64_t position_ = 0;
};

// A name that ends in .gz is decompressed. Throws when there is no such file, or when it is not a file.
std::unique_ptr<ByteSource> open_bytes(const std::filesystem::path& path, const std::string& mend);

}  // namespace tandem
