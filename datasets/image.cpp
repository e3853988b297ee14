// The only file that includes stb. Only formats with safe decoders are compiled in: those of GIF, PSD, HDR and PIC have
// known vulnerabilities.
#include "datasets/image.h"

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <memory>
#include <regex>
#include <string>
#include <string_view>

#include "core/machine.h"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wall"
#pragma GCC diagnostic ignored "-Wextra"
#define STB_IMAGE_STATIC
#define STB_IMAGE_IMPLEMENTATION
#define STBI_ONLY_JPEG
#define STBI_ONLY_PNG
#define STBI_ONLY_BMP
#define STBI_ONLY_PNM
#define STBI_NO_STDIO
#define STBI_NO_LINEAR
// Zeroed memory, because the JPEG decoder reads tables that a damaged file does not fill; random contents could crash
// it.
#define STBI_MALLOC(bytes) std::calloc(1, bytes)
#define STBI_REALLOC(block, bytes) std::realloc(block, bytes)
#define STBI_FREE(block) std::free(block)
#include <stb/stb_image.h>
// Its assertion about the sum of a pixel's weights is too narrow: it fails for usual sizes (300 × 300 to 224 × 224).
// The weights are divided by the sum afterwards.
#define STBIR_ASSERT(condition) static_cast<void>(0)
#define STB_IMAGE_RESIZE_STATIC
#define STB_IMAGE_RESIZE_IMPLEMENTATION
#include <stb/stb_image_resize.h>
#pragma GCC diagnostic pop

namespace tandem {
namespace {

constexpr std::int64_t longest = 1 << 14;  // pixels along a side

// Checks that stb_image lacks: it fills missing data with zeros and compares no checksum.
struct Structure {
  const std::vector<std::uint8_t>& bytes;
  const ByteSource& file;
  std::uint64_t at = 0;

  // Reads the next bytes as a number, the highest first.
  std::uint32_t next(int count) {
    const std::uint64_t begin = at;
    skip(std::uint64_t(count));
    std::uint32_t v = 0;
    for (std::uint64_t i = begin; i < at; i++) v = v << 8 | bytes[i];
    return v;
  }
  void skip(std::uint64_t count) {
    if (count > bytes.size() - at) file.reject("truncated after ", bytes.size(), " bytes");
    at += count;
  }

  // Checks the segments (FF, marker, length, …) up to the scan, and the end marker after it. Returns true for four
  // channels without Adobe's marker, which Pillow reads as CMYK and stb as YCbCr.
  bool jpeg() {
    bool adobe = false, four = false;
    skip(2);
    while (true) {
      if (next(1) != 0xff) file.reject("no JPEG marker at byte ", at - 1);
      std::uint32_t marker = next(1);
      while (marker == 0xff) marker = next(1);
      const std::uint64_t begin = at;
      const std::uint32_t length = next(2);
      if (length < 2) file.reject("a JPEG segment of ", length, " bytes at byte ", begin);
      skip(length - 2);
      if (marker == 0xda) break;
      adobe |= marker == 0xee && length >= 14 && std::equal(&bytes[begin + 2], &bytes[begin + 7], "Adobe");
      if (marker >= 0xc0 && marker <= 0xc2 && length > 7) four = bytes[begin + 7] == 4;
    }
    constexpr std::uint8_t end[] = {0xff, 0xd9};
    if (std::search(bytes.begin() + std::int64_t(at), bytes.end(), end, end + 2) == bytes.end())
      file.reject("truncated after ", bytes.size(), " bytes: a JPEG without its end marker");
    return four && !adobe;
  }

  // Chunks: length, type, data, checksum (CRC-32) of type and data; the last is IEND.
  void png() {
    skip(8);
    for (std::uint32_t type = 0; type != 0x49454e44;) {
      const std::uint64_t length = next(4), begin = at;
      skip(length + 4);
      std::uint32_t crc = ~0u;
      for (std::uint64_t i = begin; i < at; i++) {
        crc ^= bytes[i];
        for (int k = 0; k < 8; k++) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
      }
      if (next(4) != ~crc) file.reject("the checksum of the PNG chunk at byte ", begin - 4, " does not fit");
      type = Structure{bytes, file, begin}.next(4);
    }
  }

  // The rows of a BMP are padded to four bytes and not compressed: stb reads no others. Numbers are little-endian. The
  // first version of the header has 12 bytes.
  void bmp(std::int64_t width, std::int64_t height) {
    const auto number = [this](std::uint64_t where) {
      at = where;
      return __builtin_bswap32(next(4));
    };
    const std::uint32_t pixels = number(10), bits = number(number(14) == 12 ? 24 : 28) & 0xffff;
    at = 0;
    skip(pixels + (std::uint64_t(width) * bits + 31) / 32 * 4 * std::uint64_t(height));
  }

  // P5 or P6, then width, height and largest value as text, one white space, and the bytes.
  void pnm(std::int64_t width, std::int64_t height) {
    static const std::regex header(R"(P[56](?:\s|#[^\n]*\n)+\d+(?:\s|#[^\n]*\n)+\d+(?:\s|#[^\n]*\n)+(\d{1,9})\s)");
    const std::string start(bytes.begin(), bytes.begin() + std::min<std::ptrdiff_t>(std::ssize(bytes), 1000));
    std::smatch part;
    if (!std::regex_search(start, part, header, std::regex_constants::match_continuous))
      file.mistaken("a PNM whose header is not width, height and largest value");
    // stb_image 2.27 reads out of bounds when it converts the channels of a 16-bit PNM, and it does not scale pixels
    // with another largest value.
    if (part[1] != "255") file.mistaken("a PNM whose largest value is ", part[1].str(), ", expected 255");
    at = std::uint64_t(part.length());
    skip(std::uint64_t(width * height) * (bytes[1] == '6' ? 3 : 1));
  }
};

// Adobe's marker, inserted so that stb reads four channels as CMYK.
constexpr std::uint8_t adobe_cmyk[] = {0xff, 0xee, 0, 14, 'A', 'd', 'o', 'b', 'e', 0, 100, 0, 0, 0, 0, 0};

}  // namespace

Image decode_image(const ByteSource& file, int channels) {
  require(channels == 1 || channels == 3, "decode_image: 1 or 3 channels, not ", channels);
  std::vector<std::uint8_t> bytes = file.all();
  if (bytes.size() > INT_MAX) file.mistaken(bytes.size(), " bytes, expected less than 2 GiB");
  const std::string_view start(reinterpret_cast<const char*>(bytes.data()), std::min<std::size_t>(bytes.size(), 8));
  const bool jpeg = start.starts_with("\xff\xd8"), png = start == "\x89PNG\r\n\x1a\n", bmp = start.starts_with("BM");
  if (!jpeg && !png && !bmp && !start.starts_with("P5") && !start.starts_with("P6"))
    file.mistaken("neither JPEG, PNG, BMP nor PNM");

  Structure structure{bytes, file};
  if (jpeg && structure.jpeg()) bytes.insert(bytes.begin() + 2, std::begin(adobe_cmyk), std::end(adobe_cmyk));
  if (png) structure.png();
  int width = 0, height = 0, own = 0;
  const bool known = stbi_info_from_memory(bytes.data(), int(bytes.size()), &width, &height, &own);
  if (bmp) height = std::abs(height);  // negative: rows from top to bottom
  if (!known) {                        // stb reports the reason only when it loads
    stbi_image_free(stbi_load_from_memory(bytes.data(), int(bytes.size()), &width, &height, &own, channels));
    file.reject("or of a kind that is not read: ", stbi_failure_reason());
  }
  if (width < 1 || height < 1) file.reject("it has no pixels");
  if (width > longest || height > longest)
    file.mistaken("it has ", height, " × ", width, " pixels, expected at most ", longest, " along a side");
  // In a JPEG, each block of 8 × 8 pixels has at least one bit; deflate expands a byte to at most 1032.
  const std::int64_t area = std::int64_t(width) * height, per_byte = jpeg ? 512 : png ? 8 * 1032 : bmp ? 8 : 1;
  if (std::uint64_t(area / per_byte) > bytes.size())
    file.reject("it announces ", height, " × ", width, " pixels, more than ", bytes.size(), " bytes can hold");
  if (bmp) structure.bmp(width, height);
  if (!jpeg && !png && !bmp) structure.pnm(width, height);
  const std::size_t needed = std::size_t(area) * (jpeg ? 12 : 8);  // a progressive JPEG also needs its coefficients
  if (const std::size_t there = needed > 64 << 20 ? available_memory() : SIZE_MAX; needed > there)
    refuse(file.path().string(), ": ", height, " × ", width, " pixels take ", needed >> 20, " MiB to decode, and ",
           there >> 20, " MiB of memory are free: make it smaller");

  const std::unique_ptr<stbi_uc, void (*)(void*)> decoded(
      stbi_load_from_memory(bytes.data(), int(bytes.size()), &width, &height, &own, channels), stbi_image_free);
  const std::string why = decoded ? "" : stbi_failure_reason();
  if (why == "outofmem") fail(file.path().string(), ": out of memory while it was decoded");
  if (!decoded) file.reject("or of a kind that is not read: ", why);
  Image image{height, width, channels, {}, own <= 2};
  image.pixels.assign(decoded.get(), decoded.get() + area * channels);
  return image;
}

void fit_square(const Image& image, int side, std::uint8_t* to) {
  const std::int64_t square = std::min(image.height, image.width), c = image.channels;
  const std::uint8_t* from =
      image.pixels.data() + ((image.height - square) / 2 * image.width + (image.width - square) / 2) * c;
  if (square == side) {
    for (int y = 0; y < side; y++) std::copy_n(from + y * image.width * c, side * c, to + y * side * c);
    return;
  }
  const int done = stbir_resize_uint8_generic(from, int(square), int(square), int(image.width * c), to, side, side, 0,
                                              int(c), STBIR_ALPHA_CHANNEL_NONE, 0, STBIR_EDGE_CLAMP,
                                              STBIR_FILTER_TRIANGLE, STBIR_COLORSPACE_LINEAR, nullptr);
  require(done == 1, "a picture of ", image.height, " × ", image.width, " could not be brought to ", side, " × ", side,
          ": out of memory");
}

}  // namespace tandem
