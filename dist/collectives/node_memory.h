// Memory shared by the processes of a host: blocks in unnamed files (memfd), which other processes find in /proc by
// their label. No message is needed, and a killed process leaves no files.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

namespace tandem {

// Any thread.
class NodeMemory {
 public:
  // words: of this process, the same for no other incarnation of no other rank of no other job.
  explicit NodeMemory(std::string words) : words_(std::move(words)) {}
  ~NodeMemory();
  NodeMemory(const NodeMemory&) = delete;
  std::shared_ptr<void> share(std::size_t bytes);  // throws Error where there is no memory
  // The block of another process of this host; empty where there is none, or it cannot be reached. Stays until this
  // object ends.
  std::span<std::byte> of(int process, const std::string& words, int number);

 private:
  std::string words_;
  std::mutex mutex_;
  std::vector<int> files_;  // of what this process shares: open for the others
  std::map<std::pair<std::string, int>, std::span<std::byte>> reached_;
};

}  // namespace tandem
