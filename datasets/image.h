// Picture files: JPEG, PNG, BMP, PNM (8 bits a channel). image.cpp (stb_image) or, where there is no stb,
// image_none.cpp is linked.
#pragma once
#include "datasets/bytes.h"

namespace tandem {

struct Image {
  std::int64_t height = 0, width = 0, channels = 0;
  std::vector<std::uint8_t> pixels;  // row-major [height, width, channels]
  bool grey = false;                 // the file has one channel, regardless of the requested number
};

// Decodes a file. `channels` is 1 (luminance) or 3 (RGB); transparency is dropped. Throws for detectable damage: a file
// that ends too early, dimensions that need more bytes than the file has, a PNG with wrong checksums. A JPEG has no
// checksums: a wrong bit in its pixels gives other pixels. Bytes after the end are allowed. A picture that does not fit
// into the free memory is refused after its header is read. May be called by any number of threads.
Image decode_image(const ByteSource& file, int channels);

// Resizes the largest centred square to `side` × `side` pixels: bilinear, and when the square shrinks, with the average
// over all pixels that fall into one. `to` has room for side · side · channels bytes.
void fit_square(const Image& image, int side, std::uint8_t* to);

}  // namespace tandem
