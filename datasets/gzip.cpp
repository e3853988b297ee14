#include <zlib.h>

#include <cmath>

#include "datasets/bytes.h"

namespace tandem {

// Uses inflate() and not gzread(), because gzread() accepts plain files and ignores bytes after the end. A file is a
// series of members (RFC 1952), and zeros may follow the last.
ByteSource gunzip(const ByteSource& compressed, Promise promise) {
  const std::vector<std::uint8_t>& from = compressed.all();
  // Bytes of output and of input for one call of inflate()
  const std::size_t step = std::min<std::size_t>(8 * from.size() + 64, 1 << 24), most = 1 << 30;
  std::vector<std::uint8_t> to;
  z_stream z{};
  if (inflateInit2(&z, 15 + 16) != Z_OK) fail("zlib could not start: ", z.msg ? z.msg : "out of memory");
  const std::unique_ptr<z_stream, int (*)(z_stream*)> ends(&z, inflateEnd);
  std::size_t at = 0, size = 0;  // read from `from`, written to `to`
  for (bool more = true; more;) {
    to.resize(size + step);
    z.next_in = const_cast<Bytef*>(from.data() + at);
    z.avail_in = uInt(std::min(from.size() - at, most));
    z.next_out = to.data() + size;
    z.avail_out = uInt(step);
    const int result = inflate(&z, Z_NO_FLUSH);
    at = std::size_t(z.next_in - from.data());
    size = std::size_t(z.next_out - to.data());
    if (const double whole = promise ? promise({to.data(), size}) : INFINITY; double(size) > whole)
      compressed.reject("goes on after ", std::uint64_t(whole), " bytes, expected its end there");
    if (result == Z_STREAM_END) {
      while (at < from.size() && from[at] == 0) at++;
      more = at < from.size();
      if (more && (from[at] != 0x1f || inflateReset(&z) != Z_OK))
        compressed.reject("has bytes after the end of its compressed data");
    } else if (result != Z_OK && result != Z_BUF_ERROR) {
      compressed.reject("no intact gzip file: ", z.msg ? z.msg : "its data are wrong");
    } else if (at == from.size() && z.avail_out > 0) {
      compressed.reject("ends before its checksum, after ", from.size(), " compressed bytes");
    }
  }
  to.resize(size);
  return ByteSource(compressed.path(), compressed.remedy(), std::move(to));
}

}  // namespace tandem
