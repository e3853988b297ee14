// Picture files: JPEG, PNG, BMP, PNM (8 bits a channel). image.cpp (stb_image) or, where there is no stb,
// image_none.cpp is linked.
#pragma once
#include "datasets/bytes.h"

namespace tandem {

struct Image {
  std::int64_t height = 0, width = 0, channels = 0;
  std::vector<std::uint8_t> pixels;  // row-major [height, width, channels]
  bool grey = false;                 // the file has one channel, whatever was asked for
};

// Decodes a file. `channels` is 1 (luminance) or 3 (RGB); transparency is dropped. Detectable damage is refused:
// a file that ends too early, sizes that cannot be in so few bytes, a PNG whose checksums do not fit. A JPEG
// has no checksums: a wrong bit in its pixels gives other pixels. Bytes after the end are allowed. A picture that the
// free memory cannot hold is refused by its header. Used by any number of threads.
Image decode_image(ByteSource& file, int channels);

// The largest centred square, brought to `side` × `side` pixels: bilinear, and where it shrinks averaging over all
// pixels that fall into one. `to` has room for side · side · channels bytes.
void fit_square(const Image& image, int side, std::uint8_t* to);

}  // namespace tandem
