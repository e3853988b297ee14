#include "core/files/atomic_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/error.h"
#include "core/files/files.h"

namespace tandem {
namespace fs = std::filesystem;

AtomicFile::AtomicFile(const fs::path& path) : given_(path) {
  std::error_code ignored;
  path_ = fs::weakly_canonical(path, ignored);
  if (path_.empty()) path_ = path;
  auto status = fs::status(path_, ignored);
  if (fs::exists(status) && !fs::is_regular_file(status))
    refuse(given_.string(), ": cannot be written: it is ", fs::is_directory(status) ? "a folder" : "not a regular file",
           "; name a file");
  temporary_ = path_.string() + "." + std::to_string(getpid()) + ".tmp";
  descriptor_ = open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (descriptor_ < 0) refuse(given_.string(), ": ", cannot_write(temporary_.string(), errno));
}

AtomicFile::~AtomicFile() {
  if (descriptor_ < 0) return;
  close(descriptor_);
  unlink(temporary_.c_str());
}

void AtomicFile::give_up(const char* what, int error) {
  if (descriptor_ >= 0) close(std::exchange(descriptor_, -1));
  unlink(temporary_.c_str());
  std::error_code ignored;
  fail(given_.string(), ": ", what, ": ", std::strerror(error),
       fs::exists(path_, ignored) ? "; the file that was there is unchanged" : "; nothing was written");
}

void AtomicFile::write(const void* bytes, std::size_t count) {
  require(descriptor_ >= 0, given_.string(), ": written to after it was finished");
  const char* from = static_cast<const char*>(bytes);
  while (count > 0) {
    ssize_t done = ::write(descriptor_, from, std::min(count, std::size_t{1} << 30));
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) give_up("could not be written", done < 0 ? errno : ENOSPC);
    from += done;
    count -= std::size_t(done);
  }
}

void AtomicFile::commit() {
  require(descriptor_ >= 0, given_.string(), ": finished twice");
  if (fsync(descriptor_) != 0) give_up("could not be written through to the disk", errno);
  if (close(std::exchange(descriptor_, -1)) != 0) give_up("could not be written", errno);
  if (rename(temporary_.c_str(), path_.c_str()) != 0) give_up("could not be put in place", errno);
  // The folder's new entry is not on the disk yet. Not every file system supports fsync of a folder.
  const std::string folder = path_.has_parent_path() ? path_.parent_path().string() : ".";
  if (const FileDescriptor opened(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)); opened.number >= 0)
    fsync(opened.number);
}

}  // namespace tandem
