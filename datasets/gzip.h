// Gzip files. gzip.cpp (zlib) or, where there is no zlib, gzip_none.cpp is linked.
#pragma once
#include "datasets/bytes.h"

namespace tandem {

// The decompressed bytes of `compressed`, whose name and mend are used in error messages.
std::unique_ptr<ByteSource> gunzip(std::unique_ptr<ByteSource> compressed);

}  // namespace tandem
