// Linked where there is no zlib.
#include "datasets/gzip.h"

namespace tandem {

std::unique_ptr<ByteSource> open_gzip(const std::filesystem::path& path, const std::string&) {
  refuse(path.string(), ": is compressed, and this program was built without zlib: run gunzip ", path.string(),
         ", or install zlib (zlib1g-dev) and build again");
}

}  // namespace tandem
