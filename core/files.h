// Whole text files.
#pragma once
#include <string>
#include <string_view>

namespace tandem {

// Replaces the file. Throws UsageError naming the path when it cannot be opened, Error when the disk is full.
void write_file(const std::string& path, std::string_view text);
std::string read_file(const std::string& path);  // throws UsageError when there is no such file, or it cannot be read

}  // namespace tandem
