#include "datasets/gzip.h"

#include <zlib.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <vector>

namespace tandem {
namespace {

// inflate() rather than gzread(): it writes straight into the caller's memory, and gzread() takes plain files for
// compressed ones and overlooks bytes after the end.
class GzipFile : public ByteSource {
 public:
  GzipFile(const std::filesystem::path& path, const std::string& source)
      : ByteSource(path, source), file_(std::fopen(path.c_str(), "rb"), &std::fclose), input_(1 << 18) {
    if (!file_) unreadable("opened");
    size_ = std::filesystem::file_size(path);
    if (inflateInit2(&z_, 15 + 16) != Z_OK) fail("zlib could not start: ", z_.msg ? z_.msg : "out of memory");
  }
  ~GzipFile() override { inflateEnd(&z_); }
  std::uint64_t at_most() const override { return 1032 * size_; }  // deflate never does better

 protected:
  std::size_t read_some(void* to, std::size_t bytes) override {
    z_.next_out = static_cast<Bytef*>(to);
    std::size_t left = bytes;
    while (left > 0 && !ended_ && fill()) {
      uInt step = static_cast<uInt>(std::min<std::size_t>(left, 1u << 30));
      z_.avail_out = step;
      int result = inflate(&z_, Z_NO_FLUSH);
      left -= step - z_.avail_out;
      if (result == Z_STREAM_END) ended_ = true;
      else if (result != Z_OK && result != Z_BUF_ERROR)
        reject("no intact gzip file: ", z_.msg ? z_.msg : "its data are wrong");
    }
    return bytes - left;
  }
  // The read of one byte before this one has made zlib see the checksum, unless the file ends before it.
  void check_end() override {
    if (!ended_) reject("ends before its checksum, after ", size_, " compressed bytes");
    if (fill()) reject("has bytes after the end of its compressed data");
  }

 private:
  bool fill() {  // false at the end of the file
    if (z_.avail_in > 0) return true;
    z_.next_in = input_.data();
    z_.avail_in = static_cast<uInt>(std::fread(input_.data(), 1, input_.size(), file_.get()));
    if (z_.avail_in == 0 && std::ferror(file_.get())) unreadable("read");
    return z_.avail_in > 0;
  }
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
  std::vector<Bytef> input_;
  std::uint64_t size_ = 0;
  z_stream z_{};
  bool ended_ = false;
};

}  // namespace

std::unique_ptr<ByteSource> open_gzip(const std::filesystem::path& path, const std::string& source) {
  return std::make_unique<GzipFile>(path, source);
}

}  // namespace tandem
