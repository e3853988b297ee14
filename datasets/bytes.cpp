#include "datasets/bytes.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "datasets/gzip.h"

namespace tandem {
namespace {

class PlainFile : public ByteSource {
 public:
  PlainFile(const std::filesystem::path& path, const Advice& advice)
      : ByteSource(path, advice), file_(std::fopen(path.c_str(), "rb"), &std::fclose) {
    if (!file_) unreadable("opened");
    std::setvbuf(file_.get(), nullptr, _IONBF, 0);  // reads are large: a buffer would only copy them once more
    size_ = std::filesystem::file_size(path);
  }
  std::uint64_t at_most() const override { return size_; }
  std::size_t read_some(void* to, std::size_t bytes) override {
    std::size_t got = std::fread(to, 1, bytes, file_.get());
    if (got < bytes && std::ferror(file_.get())) unreadable("read");
    return got;
  }

 private:
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
  std::uint64_t size_ = 0;
};

class Memory : public ByteSource {
 public:
  Memory(std::span<const std::uint8_t> bytes, const std::filesystem::path& name, const Advice& advice)
      : ByteSource(name, advice), left_(bytes), size_(bytes.size()) {}
  std::uint64_t at_most() const override { return size_; }
  std::size_t read_some(void* to, std::size_t bytes) override {
    std::size_t got = std::min(bytes, left_.size());
    if (got) std::memcpy(to, left_.data(), got);
    left_ = left_.subspan(got);
    return got;
  }

 private:
  std::span<const std::uint8_t> left_;
  std::uint64_t size_;
};

}  // namespace

void ByteSource::read(void* to, std::size_t bytes, std::uint64_t total) {
  std::size_t got = read_some(to, bytes);
  position_ += got;
  if (got < bytes) reject("truncated after ", position_, " bytes, expected ", total);
}

std::vector<std::uint8_t> ByteSource::read_all() {
  std::vector<std::uint8_t> all;
  for (std::size_t step = std::min<std::uint64_t>(at_most(), 1 << 24) + 1;;) {  // one more, to see the end at once
    std::size_t before = all.size();
    all.resize(before + step);
    std::size_t got = read_some(all.data() + before, step);
    all.resize(before + got);
    if (got < step) break;
  }
  position_ += all.size();
  check_end();
  return all;
}

void ByteSource::expect_end() {
  std::uint8_t extra;
  if (read_some(&extra, 1) > 0) reject("goes on after ", position_, " bytes, expected its end there");
  check_end();
}

void ByteSource::unreadable(const char* what) const {
  refuse(path_.string(), ": cannot be ", what, ": ", std::strerror(errno));
}

std::unique_ptr<ByteSource> open_bytes(const std::filesystem::path& path, const Advice& advice) {
  std::error_code ignored;
  auto status = std::filesystem::status(path, ignored);
  if (status.type() == std::filesystem::file_type::not_found)
    refuse(path.string(), ": there is no such file: ", advice.source);
  if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status))
    refuse(path.string(), ": is ", std::filesystem::is_directory(status) ? "a directory" : "not a regular file",
           ", expected a file: move it away and ", advice.source);
  auto file = std::make_unique<PlainFile>(path, advice);
  if (path.extension() == ".gz") return gunzip(std::move(file));
  return file;
}

std::unique_ptr<ByteSource> bytes_in_memory(std::span<const std::uint8_t> bytes, const std::filesystem::path& name,
                                            const Advice& advice) {
  return std::make_unique<Memory>(bytes, name, advice);
}

}  // namespace tandem
