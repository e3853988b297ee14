// A file that is either the old one or the whole new one, whatever happens in between: a full disk, a kill, a power
// cut.
#pragma once
#include <filesystem>

namespace tandem {

// Bytes go to a temporary file in the same folder; commit() writes them through to the disk and renames it into place.
// Without commit() the temporary file is removed again. A symbolic link stays one: the file behind it is replaced. Only
// a kill in between can leave NAME.PROCESS.tmp behind. One thread at a time.
class AtomicFile {
 public:
  // Throws UsageError when the folder is not there or may not be written to, or when `path` is something else than a
  // file.
  explicit AtomicFile(const std::filesystem::path& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* bytes, std::size_t count);  // appends; throws Error when the disk is full
  void commit();                                     // after this the new file is there, also after a power cut

 private:
  [[noreturn]] void give_up(const char* what, int error);
  std::filesystem::path given_, path_, temporary_;
  int descriptor_ = -1;
};

}  // namespace tandem
