#include "core/files/files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "core/error.h"
#include "core/files/atomic_file.h"

namespace tandem {

void write_file(const std::string& path, std::string_view text) {
  AtomicFile file(path);
  file.write(text.data(), text.size());
  file.commit();
}

std::string read_file(const std::string& path) {
  errno = 0;
  const OpenFile file = open_file(path, "r");
  std::string text;
  char part[1 << 16];
  for (std::size_t n; file && (n = std::fread(part, 1, sizeof part, file.get())) > 0;) text.append(part, n);
  if (!file || std::ferror(file.get())) refuse(path, ": cannot be read: ", std::strerror(errno));
  return text;
}

std::string cannot_write(const std::string& path, int error) {
  namespace fs = std::filesystem;
  std::error_code none;
  const std::string text = std::string("cannot be written: ") + std::strerror(error);
  fs::path at = fs::absolute(path, none).lexically_normal();
  if (!at.has_filename()) at = at.parent_path();
  const fs::path parent = at.parent_path();
  if (error == ENOENT && !fs::exists(parent, none))
    return text + ": there is no folder " + parent.string() + " (make the folder first)";
  if (error != EACCES && error != EPERM && error != EROFS) return text;
  if (fs::exists(at, none) && !fs::is_directory(at, none))
    return text + ": name another file, or change its permissions";
  while (!fs::exists(at, none) && at.has_relative_path()) at = at.parent_path();
  return text + " in the folder " + at.string() + ": name another place, or change that folder's permissions";
}

void make_folder(const std::string& name, const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (!error && faccessat(AT_FDCWD, path.c_str(), W_OK, AT_EACCESS) != 0) error.assign(errno, std::generic_category());
  if (error) refuse(name, ": ", cannot_write(path, error.value()));
}

void check_replaceable(const std::string& option, const std::string& path, std::string_view mark,
                       const std::string& kind) {
  std::error_code none;  // devices and pipes are not overwritten
  if (!std::filesystem::is_regular_file(path, none) || std::filesystem::file_size(path, none) == 0) return;
  std::string head(1 << 16, '\0');  // a safetensors header may begin with a thousand names of classes
  std::ifstream(path, std::ios::binary).read(head.data(), std::streamsize(head.size()));
  if (head.find(mark) == head.npos)
    refuse(option, " ", path, ": is there and holds something else than ", kind, ": choose another name");
}

void check_output(const std::string& option, const std::string& path, std::string_view mark, const std::string& kind) {
  if (path.empty()) return;
  check_replaceable(option, path, mark, kind);
  for_option(option, [&] { AtomicFile without_commit(path); });
}

// " (process 24280)", or empty. A line of /proc/locks: "1: FLOCK  ADVISORY  WRITE 24280 fe:00:10952785 0 EOF".
static std::string holder_of(int descriptor) {
  struct stat s {};
  fstat(descriptor, &s);
  const std::string inode = std::string(":") + std::to_string(s.st_ino);
  std::ifstream locks("/proc/locks");
  for (std::string number, kind, advisory, mode, process, place, rest;
       locks >> number >> kind >> advisory >> mode >> process >> place && std::getline(locks, rest);)
    if (kind == "FLOCK" && place.ends_with(inode) && process != "0") return " (process " + process + ")";
  return "";
}

void FileLock::take(const std::string& path, const std::string& name, const std::string& does) {
  file_.number = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file_.number >= 0 && flock(file_.number, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
    refuse(name, ": another run", holder_of(file_.number), " ", does);
}

FileDescriptor::~FileDescriptor() {
  if (number >= 0) close(number);
}

}  // namespace tandem
