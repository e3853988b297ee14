#include "core/files.h"

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "core/error.h"

namespace tandem {

void write_file(const std::string& path, std::string_view text) {
  std::FILE* file = std::fopen(path.c_str(), "w");
  if (!file) refuse(path, ": cannot be written: ", std::strerror(errno));
  bool good = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  int error = errno;
  if (std::fclose(file) != 0) good = false, error = errno;
  if (!good) fail(path, ": could not be written whole: ", std::strerror(error));
}

std::string read_file(const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "r");
  if (!file) refuse(path, ": cannot be read: ", std::strerror(errno));
  std::string text;
  char part[1 << 16];
  errno = 0;
  for (std::size_t n; (n = std::fread(part, 1, sizeof part, file)) > 0;) text.append(part, n);
  int error = std::ferror(file) ? errno : 0;
  std::fclose(file);
  if (error) refuse(path, ": cannot be read: ", std::strerror(error));
  return text;
}

}  // namespace tandem
