// Memory shared by the processes of a host: blocks in unnamed files (memfd), which other processes find in /proc by
// their label. No message is needed, and a killed process leaves no files.
#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "core/error.h"

namespace tandem {

// Any thread.
class NodeMemory {
 public:
  // words: the label of this process, unique to its job, rank and incarnation.
  explicit NodeMemory(std::string words) : words_(std::move(words)) {}
  ~NodeMemory() {
    for (auto& [key, block] : reached_) munmap(block.data(), block.size());
    for (int fd : files_) close(fd);
  }
  NodeMemory(const NodeMemory&) = delete;
  // Throws Error if there is not enough memory.
  std::shared_ptr<void> share(std::size_t bytes) {
    std::lock_guard lock(mutex_);
    const std::size_t length = std::max<std::size_t>(bytes, 1);
    const int fd = memfd_create(name_of(words_, int(files_.size())).c_str(), MFD_CLOEXEC);
    void* at = MAP_FAILED;
    if (fd >= 0 && ftruncate(fd, off_t(length)) == 0)
      at = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) {
      const int why = errno;
      if (fd >= 0) close(fd);
      fail("no ", bytes, " bytes of memory to share with the other ranks of this host: ", std::strerror(why));
    }
    files_.push_back(fd);
    return {at, [length](void* p) { munmap(p, length); }};
  }
  // The block of another process of this host; empty if there is none or it is not reachable. Valid until this object
  // is destroyed.
  std::span<std::byte> of(int process, const std::string& words, int number) {
    std::lock_guard lock(mutex_);
    if (auto known = reached_.find({words, number}); known != reached_.end()) return known->second;
    const std::string name = "/memfd:" + name_of(words, number) + " (deleted)";
    std::error_code none;
    // An iterator's ++ throws if the process ends meanwhile; increment() does not.
    for (std::filesystem::directory_iterator at("/proc/" + std::to_string(process) + "/fd", none), end;
         !none && at != end; at.increment(none)) {
      if (std::filesystem::read_symlink(at->path(), none) != name) {
        none.clear();  // it was closed meanwhile
        continue;
      }
      const int fd = open(at->path().c_str(), O_RDWR | O_CLOEXEC);
      struct stat s {};
      void* memory = MAP_FAILED;
      if (fd >= 0 && fstat(fd, &s) == 0 && s.st_size > 0)
        memory = mmap(nullptr, std::size_t(s.st_size), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
      if (fd >= 0) close(fd);
      if (memory == MAP_FAILED) return {};
      return reached_[{words, number}] = {static_cast<std::byte*>(memory), std::size_t(s.st_size)};
    }
    return {};
  }

 private:
  static std::string name_of(const std::string& words, int number) {
    return "tandem-" + words + "-" + std::to_string(number);
  }
  std::string words_;
  std::mutex mutex_;
  std::vector<int> files_;  // of the shared blocks: kept open for the other processes
  std::map<std::pair<std::string, int>, std::span<std::byte>> reached_;
};

}  // namespace tandem
