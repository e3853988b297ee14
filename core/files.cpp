#include "core/files.h"

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "core/atomic_file.h"
#include "core/error.h"

namespace tandem {

void write_file(const std::string& path, std::string_view text) {
  AtomicFile file(path);
  file.write(text.data(), text.size());
  file.commit();
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
