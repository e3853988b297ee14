// Whole text files, and locks on files and folders.
#pragma once
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>

#include "core/error.h"

namespace tandem {

// Replaces the file in one step (core/files/atomic_file.h). Throws UsageError naming the path when it cannot be
// written, Error when the disk is full.
void write_file(const std::string& path, std::string_view text);
std::string read_file(const std::string& path);  // throws UsageError when there is no such file, or it cannot be read

// The end of an error: why the file or folder `path` could not be made or opened for writing, where `error` is what
// errno said. "Permission denied in the folder /root: …" where a parent forbids it, and otherwise which folder is
// missing.
std::string cannot_write(const std::string& path, int error);
// Makes the folder and those above it. Throws UsageError, beginning with `name`, when it cannot be made or written to.
void make_folder(const std::string& name, const std::string& path);

// Throws UsageError, beginning with `option`, when `path` is a file that holds something and not `mark` among its first
// 64 KiB: what is not a `kind` written earlier was named by mistake, and must not be lost.
void check_replaceable(const std::string& option, const std::string& path, std::string_view mark,
                       const std::string& kind);
// Calls check_replaceable(), and throws UsageError, beginning with `option`, when the file cannot be written. Changes
// no file. Does nothing for an empty path.
void check_output(const std::string& option, const std::string& path, std::string_view mark, const std::string& kind);

// Returns f(). Puts `option` before the text of a UsageError of f: "--resume run/last.safetensors: is damaged".
template <class F>
auto for_option(const std::string& option, const F& f) {
  try {
    return f();
  } catch (const UsageError& e) {
    throw UsageError(option + " " + e.what());
  }
}

// A file of the C library, closed at the end of its life; empty: it cannot be opened, errno says why.
using OpenFile = std::unique_ptr<std::FILE, int (*)(std::FILE*)>;
inline OpenFile open_file(const std::string& path, const char* mode) {
  return {std::fopen(path.c_str(), mode), std::fclose};
}

// An open file; closed at the end of its life.
struct FileDescriptor {
  int number = -1;  // none
  explicit FileDescriptor(int opened = -1) : number(opened) {}
  FileDescriptor(const FileDescriptor&) = delete;
  ~FileDescriptor();
};

// Keeps a second process out of a file or folder. The kernel lets go when the process ends, however it ends, and
// nothing is left behind.
class FileLock {
 public:
  // Throws UsageError when another process has it: "NAME: another run (process 17) DOES". Where there are no locks,
  // none is taken.
  void take(const std::string& path, const std::string& name, const std::string& does);

 private:
  FileDescriptor file_;
};

}  // namespace tandem
