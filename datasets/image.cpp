// The one file that sees stb. Only the formats whose decoders are sound are compiled in: those of GIF, PSD, HDR and PIC
// have known holes.
#include "datasets/image.h"

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <memory>

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
#define STBI_MAX_DIMENSIONS (1 << 14)
// Zeroed: the JPEG decoder looks at tables that a damaged file never filled, and what it found there could end the program.
#define STBI_MALLOC(bytes) std::calloc(1, bytes)
#define STBI_REALLOC(block, bytes) std::realloc(block, bytes)
#define STBI_FREE(block) std::free(block)
#include <stb/stb_image.h>
#define STB_IMAGE_RESIZE_STATIC
#define STB_IMAGE_RESIZE_IMPLEMENTATION
#include <stb/stb_image_resize.h>
#pragma GCC diagnostic pop

namespace tandem {

Image decode_image(ByteSource& file, int channels) {
  require(channels == 1 || channels == 3, "decode_image: 1 or 3 channels, not ", channels);
  const std::vector<std::uint8_t> bytes = file.read_all();
  const ImageSize announced = check_structure(bytes, file);
  if (bytes.size() > INT_MAX) file.mistaken(bytes.size(), " bytes, expected less than 2 GiB");
  int width = 0, height = 0, own = 0;
  const std::unique_ptr<stbi_uc, void (*)(void*)> decoded(
      stbi_load_from_memory(bytes.data(), int(bytes.size()), &width, &height, &own, channels), stbi_image_free);
  if (!decoded) file.reject("it cannot be decoded: ", stbi_failure_reason());
  if (width != announced.width || height != announced.height)
    file.reject("it announces ", announced.height, " × ", announced.width, " pixels and has ", height, " × ", width);
  Image image{height, width, channels, {}, own <= 2};
  image.pixels.assign(decoded.get(), decoded.get() + std::int64_t(width) * height * channels);
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
