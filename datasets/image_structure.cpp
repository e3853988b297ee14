// What stb_image does not look at: it fills up what is missing with zeros, and compares no checksum.
#include <algorithm>
#include <array>
#include <cctype>
#include <cstring>
#include <string_view>

#include "datasets/image.h"

namespace tandem {
namespace {

constexpr std::int64_t largest = 1 << 14;  // pixels along a side

struct Reader {
  const std::vector<std::uint8_t>& bytes;
  const ByteSource& file;
  std::uint64_t size() const { return bytes.size(); }
  void need(std::uint64_t end) const {
    if (end > size()) file.reject("truncated after ", size(), " bytes");
  }
  std::uint32_t big(std::uint64_t at, int width) const {
    need(at + std::uint64_t(width));
    std::uint32_t v = 0;
    for (int i = 0; i < width; i++) v = v << 8 | bytes[at + std::uint64_t(i)];
    return v;
  }
  std::uint32_t little(std::uint64_t at, int width) const {
    need(at + std::uint64_t(width));
    std::uint32_t v = 0;
    for (int i = width; i-- > 0;) v = v << 8 | bytes[at + std::uint64_t(i)];
    return v;
  }
  // `per_byte`: pixels that a byte of the file can stand for.
  ImageSize checked_size(std::int64_t height, std::int64_t width, std::uint64_t per_byte) const {
    if (height < 1 || width < 1 || height > largest || width > largest)
      file.reject("it announces ", height, " × ", width, " pixels, expected 1 to ", largest, " along a side");
    if (std::uint64_t(height * width) / per_byte > size())
      file.reject("it announces ", height, " × ", width, " pixels, more than ", size(), " bytes can hold");
    return {height, width};
  }
};

// Segments FF marker length …; after a start of scan come entropy-coded bytes in which FF is followed by 00 or a restart
// marker, until the next marker.
ImageSize jpeg(const Reader& r) {
  ImageSize found;
  std::uint64_t at = 2;
  for (bool scans = false;;) {
    if (r.big(at, 1) != 0xff) r.file.reject("no JPEG marker at byte ", at);
    while (r.big(at, 1) == 0xff) at++;
    const std::uint32_t marker = r.big(at++, 1);
    if (marker == 0xd9) {
      if (!scans || found.height == 0) r.file.reject("a JPEG without a picture");
      return found;
    }
    if (marker == 0x01 || (marker >= 0xd0 && marker <= 0xd8)) continue;
    const std::uint32_t length = r.big(at, 2);
    if (length < 2) r.file.reject("a JPEG segment of ", length, " bytes at byte ", at);
    r.need(at + length);
    const bool frame = marker >= 0xc0 && marker <= 0xcf && marker != 0xc4 && marker != 0xc8 && marker != 0xcc;
    if (frame) found = r.checked_size(r.big(at + 3, 2), r.big(at + 5, 2), 512);  // each 8 × 8 block has a bit at least
    at += length;
    if (marker != 0xda) continue;
    for (scans = true;; at++) {
      const void* next = at < r.size() ? std::memchr(r.bytes.data() + at, 0xff, r.size() - at) : nullptr;
      if (!next) r.file.reject("truncated after ", r.size(), " bytes: a JPEG without its end marker");
      at = std::uint64_t(static_cast<const std::uint8_t*>(next) - r.bytes.data());
      const std::uint32_t after = r.big(at + 1, 1);
      if (after == 0xff) continue;
      if (after != 0 && !(after >= 0xd0 && after <= 0xd7)) break;
    }
  }
}

std::uint32_t crc32(const std::uint8_t* bytes, std::uint64_t count) {
  static const auto table = [] {
    std::array<std::uint32_t, 256> t;
    for (std::uint32_t i = 0; i < 256; i++) {
      t[i] = i;
      for (int k = 0; k < 8; k++) t[i] = t[i] >> 1 ^ (t[i] & 1 ? 0xedb88320u : 0);
    }
    return t;
  }();
  std::uint32_t c = ~0u;
  for (std::uint64_t i = 0; i < count; i++) c = table[(c ^ bytes[i]) & 255] ^ c >> 8;
  return ~c;
}

// Chunks: length, type, data, checksum of type and data; the first is IHDR, the last IEND.
ImageSize png(const Reader& r) {
  ImageSize found;
  for (std::uint64_t at = 8;;) {
    const std::uint64_t length = r.big(at, 4);
    r.need(at + 12 + length);
    const std::string_view type(reinterpret_cast<const char*>(r.bytes.data() + at + 4), 4);
    if (crc32(r.bytes.data() + at + 4, length + 4) != r.big(at + 8 + length, 4))
      r.file.reject("the checksum of the PNG chunk at byte ", at, " does not fit");
    if (at == 8) {
      if (type != "IHDR" || length != 13) r.file.reject("a PNG without its header");
      found = r.checked_size(r.big(at + 12, 4), r.big(at + 8, 4), 8 * 1032);  // one bit a pixel, and deflate at its best
    }
    if (type == "IEND") return found;
    at += 12 + length;
  }
}

ImageSize bmp(const Reader& r) {
  const std::uint32_t header = r.little(14, 4);
  const bool old = header == 12;
  const std::int64_t width = old ? r.little(18, 2) : std::int32_t(r.little(18, 4));
  const std::int64_t height = old ? r.little(20, 2) : std::int32_t(r.little(22, 4));  // negative: from the top down
  const std::uint64_t bits = r.little(old ? 24 : 28, 2);
  const ImageSize found = r.checked_size(height < 0 ? -height : height, width, 8);
  if (bits == 0 || bits > 32) r.file.reject("a BMP of ", bits, " bits a pixel");
  const std::uint64_t row = (std::uint64_t(width) * bits + 31) / 32 * 4;
  r.need(r.little(10, 4) + row * std::uint64_t(found.height));
  return found;
}

// P5 or P6, then width, height and largest value as text, one white space, and the bytes.
ImageSize pnm(const Reader& r) {
  std::uint64_t at = 2;
  auto number = [&] {
    for (; std::isspace(int(r.big(at, 1))) || r.bytes[at] == '#'; at++)
      if (r.bytes[at] == '#')
        while (r.big(at, 1) != '\n') at++;
    std::int64_t v = -1;
    for (; std::isdigit(int(r.big(at, 1))); at++) {
      v = 10 * std::max<std::int64_t>(v, 0) + r.bytes[at] - '0';
      if (v > 65535) break;
    }
    if (v < 1) r.file.reject("a PNM header without its numbers");
    if (v > 65535) r.file.mistaken("a PNM header with a number above 65535");
    return v;
  };
  const std::int64_t width = number(), height = number(), most = number();
  // stb_image 2.27 reads beyond its memory where it converts the channels of 16-bit PNM.
  if (most > 255) r.file.mistaken("a PNM of 16 bits a channel, expected 8");
  if (most < 255) r.file.mistaken("a PNM whose largest value is ", most, ", expected 255");  // stb would not scale it
  const std::uint64_t channels = r.bytes[1] == '6' ? 3 : 1;
  const ImageSize found = r.checked_size(height, width, 1);
  r.need(at + 1 + std::uint64_t(height * width) * channels);
  return found;
}

}  // namespace

ImageSize check_structure(const std::vector<std::uint8_t>& bytes, const ByteSource& file) {
  const Reader r{bytes, file};
  const std::string_view start(reinterpret_cast<const char*>(bytes.data()), std::min<std::size_t>(bytes.size(), 8));
  if (bytes.empty()) file.reject("it is empty");
  if (start.starts_with("\xff\xd8")) return jpeg(r);
  if (start == "\x89PNG\r\n\x1a\n") return png(r);
  if (start.starts_with("BM")) return bmp(r);
  if (start.starts_with("P5") || start.starts_with("P6")) return pnm(r);
  file.mistaken("neither JPEG, PNG, BMP nor PNM");
}

bool is_picture(const std::filesystem::path& path) {
  std::string e = path.extension().string();
  std::transform(e.begin(), e.end(), e.begin(), [](unsigned char c) { return char(std::tolower(c)); });
  return e == ".jpg" || e == ".jpeg" || e == ".png" || e == ".bmp" || e == ".ppm" || e == ".pgm";
}

}  // namespace tandem
