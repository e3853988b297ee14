// Memory that processes of one host share, one block after the other: files without a name, which the others find in /proc by
// the words that say whose they are. No message is needed, and nothing is left behind when a process is killed.
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
  // The block of another process of this host; empty where there is none, or it cannot be reached. Stays until this object ends.
  std::span<std::byte> of(int process, const std::string& words, int number);

 private:
  std::string words_;
  std::mutex mutex_;
  std::vector<int> files_;  // of what this process shares: open for the others
  std::map<std::pair<std::string, int>, std::span<std::byte>> reached_;
};

}  // namespace tandem
