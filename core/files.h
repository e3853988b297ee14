// Whole text files.
#pragma once
#include <string>
#include <string_view>

namespace tandem {

// Replaces the file in one step (core/atomic_file.h). Throws UsageError naming the path when it cannot be written, Error when the
// disk is full.
void write_file(const std::string& path, std::string_view text);
std::string read_file(const std::string& path);  // throws UsageError when there is no such file, or it cannot be read

}  // namespace tandem
