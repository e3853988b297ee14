// Linked where there is no zlib.
#include "datasets/bytes.h"

namespace tandem {

ByteSource gunzip(const ByteSource& compressed, Promise) {
  const std::string path = compressed.path().string();
  refuse(path, ": is compressed, and this program was built without zlib: run gunzip ", path,
         ", or install zlib (zlib1g-dev) and build again");
}

}  // namespace tandem
