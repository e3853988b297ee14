// Whole text files, and locks on files and folders.
#pragma once
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>

#include "core/error.h"

namespace tandem {

// Replaces the file in one step (core/files/atomic_file.h). Throws UsageError, which names the path, when it cannot be
// written; Error when the disk is full.
void write_file(const std::string& path, std::string_view text);
std::string read_file(const std::string& path);  // throws UsageError when there is no such file, or it cannot be read

// The end of an error text: why the file or folder `path` could not be created or opened for writing, and the remedy.
// error: the value of errno. Example: "cannot be written: Permission denied in the folder /root: …".
std::string cannot_write(const std::string& path, int error);
// Creates the folder and its parents. Throws UsageError, which begins with `name`, when that fails or the folder is not
// writable.
void make_folder(const std::string& name, const std::string& path);

// Throws UsageError, which begins with `option`, when `path` is a non-empty file without `mark` in its first 64 KiB.
// Such a file is not a `kind` that was written earlier; it was named by mistake and must not be overwritten.
void check_replaceable(const std::string& option, const std::string& path, std::string_view mark,
                       const std::string& kind);
// Calls check_replaceable(), and throws UsageError, which begins with `option`, when the file cannot be written.
// Changes no file. Does nothing for an empty path.
void check_output(const std::string& option, const std::string& path, std::string_view mark, const std::string& kind);

// Returns f(). Puts `option` before the text of a UsageError of f, unless an option is there already: "--resume
// run/last.safetensors: is damaged".
template <class F>
auto for_option(const std::string& option, const F& f) {
  try {
    return f();
  } catch (const UsageError& e) {
    throw UsageError(e.what()[0] == '-' ? e.what() : option + " " + e.what());
  }
}

// A file of the C library, closed by the destructor; null: it cannot be opened, errno has the cause.
using OpenFile = std::unique_ptr<std::FILE, int (*)(std::FILE*)>;
inline OpenFile open_file(const std::string& path, const char* mode) {
  return {std::fopen(path.c_str(), mode), std::fclose};
}

// An open file, closed by the destructor.
struct FileDescriptor {
  int number = -1;  // −1: none
  explicit FileDescriptor(int opened = -1) : number(opened) {}
  FileDescriptor(const FileDescriptor&) = delete;
  ~FileDescriptor();
};

// Locks a file or folder against other processes. The kernel releases the lock when the process ends for any reason; no
// lock file is left behind.
class FileLock {
 public:
  // Throws UsageError when another process holds the lock: "NAME: another run (process 17) DOES". On a file system
  // without locks none is taken.
  void take(const std::string& path, const std::string& name, const std::string& does);

 private:
  FileDescriptor file_;
};

}  // namespace tandem
