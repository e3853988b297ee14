// Gzip files. gzip.cpp (zlib) or, where there is no zlib, gzip_none.cpp is linked.
#pragma once
#include "datasets/bytes.h"

namespace tandem {

std::unique_ptr<ByteSource> open_gzip(const std::filesystem::path& path, const std::string& source);

}  // namespace tandem
