// Linked where there is no stb.
#include "datasets/image.h"

namespace tandem {

Image decode_image(const ByteSource& file, int) {
  refuse(file.path().string(), ": is a picture, and this program was built without stb: install it (libstb-dev) ",
         "and build again");
}

void fit_square(const Image&, int, std::uint8_t*) { fail("this program was built without stb"); }

}  // namespace tandem
