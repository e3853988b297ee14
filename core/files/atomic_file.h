// Replaces a file in one step: after a full disk, a kill or a power failure it is the complete old or new file.
#pragma once
#include <filesystem>

namespace tandem {

// write() appends to a temporary file in the same folder; commit() flushes it to the disk and renames it. Without
// commit() the destructor removes it. If `path` is a symbolic link, the file that it points to is replaced. Only a kill
// can leave NAME.PROCESS.tmp behind. One thread at a time.
class AtomicFile {
 public:
  // Throws UsageError when the folder does not exist or is not writable, or when `path` is not a regular file.
  explicit AtomicFile(const std::filesystem::path& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* bytes, std::size_t count);  // throws Error when the disk is full
  void commit();                                     // replaces the file; the new one survives a power failure

 private:
  [[noreturn]] void give_up(const char* what, int error);
  std::filesystem::path given_, path_, temporary_;
  int descriptor_ = -1;
};

}  // namespace tandem
