#include "datasets/bytes.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "datasets/dataset.h"

namespace tandem {
namespace {

class PlainFile : public ByteSource {
 public:
  PlainFile(const std::filesystem::path& path, const std::string& remedy)
      : ByteSource(path, remedy), file_(std::fopen(path.c_str(), "rb"), &std::fclose) {
    if (!file_) refuse(path.string(), ": cannot be opened: ", std::strerror(errno));
    std::setvbuf(file_.get(), nullptr, _IONBF, 0);  // reads are large, and a buffer would copy them once more
    size_ = std::filesystem::file_size(path);
  }
  std::uint64_t at_most() const override { return size_; }
  void rewind() { std::rewind(file_.get()); }
  std::size_t read_some(void* to, std::size_t bytes) override {
    std::size_t got = std::fread(to, 1, bytes, file_.get());
    if (got < bytes && std::ferror(file_.get())) refuse(path().string(), ": cannot be read: ", std::strerror(errno));
    return got;
  }

 private:
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
  std::uint64_t size_ = 0;
};

}  // namespace

void ByteSource::read(void* to, std::size_t bytes, std::uint64_t total) {
  std::size_t got = read_some(to, bytes);
  if (got < bytes) reject("truncated after ", position_ + got, " bytes, expected ", std::max(total, position_ + bytes));
  position_ += bytes;
}

void ByteSource::expect_array(const Shape& shape, std::size_t width) const {
  // A floating-point number, because a damaged header may announce more bytes than 64 bits can count
  double total = double(width);
  for (std::int64_t size : shape) total *= double(size);
  total += double(position_);
  if (total > double(at_most()))
    reject("truncated, or its header ", shape, " is damaged: it holds at most ", at_most(), " bytes, expected ",
           std::uint64_t(std::min(total, 1e18)));
}

Tensor ByteSource::read_array(const Shape& shape, DType dtype) {
  expect_array(shape, size_of(dtype));
  Tensor t = host_tensor(shape, dtype);
  read(t.raw_write(), t.bytes());
  expect_end();
  return t;
}

std::vector<std::uint8_t> ByteSource::read_all() {
  std::vector<std::uint8_t> all;
  // One byte more, so that the first read detects the end
  for (std::size_t step = std::min<std::uint64_t>(at_most(), 1 << 24) + 1;;) {
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

std::unique_ptr<ByteSource> open_bytes(const std::filesystem::path& path, const std::string& remedy) {
  std::error_code ignored;
  auto status = std::filesystem::status(path, ignored);
  if (status.type() == std::filesystem::file_type::not_found) {
    const auto link = std::filesystem::read_symlink(path, ignored);
    refuse(path.string(),
           link.empty() ? ": there is no such file: " : ": is a link to " + link.string() + ", which is not there: ",
           remedy);
  }
  if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status))
    refuse(path.string(), ": is ", std::filesystem::is_directory(status) ? "a directory" : "not a regular file",
           ", expected a file: move it away and ", remedy);
  auto file = std::make_unique<PlainFile>(path, remedy);
  std::uint8_t magic[2] = {};
  file->read_some(magic, 2);
  file->rewind();
  if (magic[0] == 0x1f && magic[1] == 0x8b) return gunzip(std::move(file));
  return file;
}

}  // namespace tandem
