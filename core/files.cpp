#include "core/files.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>

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

void check_replaceable(const std::string& option, const std::string& path, std::string_view mark,
                       const std::string& kind) {
  std::error_code none;  // devices and pipes have nothing to lose
  if (!std::filesystem::is_regular_file(path, none) || std::filesystem::file_size(path, none) == 0) return;
  std::string head(1 << 16, '\0');  // a safetensors header may begin with a thousand names of classes
  std::ifstream(path, std::ios::binary).read(head.data(), std::streamsize(head.size()));
  if (head.find(mark) == head.npos)
    refuse(option, " ", path, ": is there and holds something else than ", kind, ": choose another name");
}

}  // namespace tandem
