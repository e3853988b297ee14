#include "datasets/bytes.h"

#include <zlib.h>

namespace tandem {
namespace {

// inflate() rather than gzread(): it writes straight into the caller's memory, and gzread() takes plain files for
// compressed ones and overlooks bytes after the end. A file is a series of members (RFC 1952), and zeros may follow the
// last.
class Gunzip : public ByteSource {
 public:
  explicit Gunzip(std::unique_ptr<ByteSource> compressed)
      : ByteSource(compressed->path(), compressed->remedy()),
        compressed_(std::move(compressed)),
        input_(std::min<std::uint64_t>(compressed_->at_most() + 1, 1 << 18)) {
    if (inflateInit2(&z_, 15 + 16) != Z_OK) fail("zlib could not start: ", z_.msg ? z_.msg : "out of memory");
  }
  ~Gunzip() override { inflateEnd(&z_); }
  std::uint64_t at_most() const override { return 1032 * compressed_->at_most(); }  // deflate's largest ratio

  std::size_t read_some(void* to, std::size_t bytes) override {
    z_.next_out = static_cast<Bytef*>(to);
    std::size_t left = bytes;
    while (left > 0 && !ended_ && fill()) {
      uInt step = static_cast<uInt>(std::min<std::size_t>(left, 1u << 30));
      z_.avail_out = step;
      int result = inflate(&z_, Z_NO_FLUSH);
      left -= step - z_.avail_out;
      if (result == Z_STREAM_END)
        ended_ = !next_member();
      else if (result != Z_OK && result != Z_BUF_ERROR)
        reject("no intact gzip file: ", z_.msg ? z_.msg : "its data are wrong");
    }
    return bytes - left;
  }

 protected:
  // expect_end() has tried to read one more byte, so zlib has verified the checksum unless the file ends before it.
  void check_end() override {
    if (!ended_) reject("ends before its checksum, after ", compressed_->at_most(), " compressed bytes");
    if (fill()) reject("has bytes after the end of its compressed data");
  }

 private:
  bool next_member() {
    while (fill() && *z_.next_in == 0) {
      z_.next_in++;
      z_.avail_in--;
    }
    return fill() && *z_.next_in == 0x1f && inflateReset(&z_) == Z_OK;
  }
  bool fill() {  // false at the end of the file
    if (z_.avail_in > 0) return true;
    z_.next_in = input_.data();
    z_.avail_in = static_cast<uInt>(compressed_->read_some(input_.data(), input_.size()));
    return z_.avail_in > 0;
  }
  std::unique_ptr<ByteSource> compressed_;
  std::vector<Bytef> input_;
  z_stream z_{};
  bool ended_ = false;
};

}  // namespace

std::unique_ptr<ByteSource> gunzip(std::unique_ptr<ByteSource> compressed) {
  return std::make_unique<Gunzip>(std::move(compressed));
}

}  // namespace tandem
