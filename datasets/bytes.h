// Reads bytes from a file, plain or compressed. Errors state what was found, what was expected and what to do. All
// format readers take a ByteSource, so that tests can pass them any bytes.
#pragma once
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "core/error.h"

namespace tandem {

// What a file's errors advise. `source` says how to get the file, "run datasets/get-data.sh cifar-10 data"; `mend`,
// what to do about wrong contents, is to move it away and get it again, unless that would be the user's own work.
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

  // Exactly `bytes` bytes, or an Error "truncated after …, expected `total`".
  void read(void* to, std::size_t bytes, std::uint64_t total);
  // Everything that is left.
  std::vector<std::uint8_t> read_all();
  // Throws when there are bytes left, or when the checksum that ends a compressed file is missing or wrong.
  void expect_end();
  // An upper bound on the number of bytes. Compare it with the size in a header before allocating memory.
  virtual std::uint64_t at_most() const = 0;
  virtual std::size_t read_some(void* to, std::size_t bytes) = 0;  // fewer than asked only at the end

  const std::filesystem::path& path() const { return path_; }
  const Advice& advice() const { return advice_; }

  // What the file holds is wrong: "truncated after 4 bytes, expected 16".
  template <class... Parts>
  [[noreturn]] void reject(const Parts&... parts) const {
    refuse(path_.string(), ": is damaged (", parts..., "): ", advice_.mend);
  }
  // It is whole, but not what is read here.
  template <class... Parts>
  [[noreturn]] void mistaken(const Parts&... parts) const {
    refuse(path_.string(), ": is another file (", parts..., "): ", advice_.mend);
  }

 protected:
  virtual void check_end() {}
  [[noreturn]] void unreadable(const char* what) const;  // with the reason in errno: a new copy would not help

 private:
  std::filesystem::path path_;
  Advice advice_;
  std::uint64_t position_ = 0;
};

// What begins as gzip files do is decompressed, whatever its name. Throws when there is no such file, or when it is not
// a file.
std::unique_ptr<ByteSource> open_bytes(const std::filesystem::path& path, const Advice& advice);

// A file beside `path` whose name has the same letters and digits but for one or two at its end:
// train-images.idx3-ubyte, "train-images-idx3-ubyte (1).gz". Empty: there is none.
std::filesystem::path similar_file(const std::filesystem::path& path);

}  // namespace tandem
