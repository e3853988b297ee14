// Memory shared by the processes of a host: blocks in unnamed files (memfd), which other processes find in /proc by
// their label. No message is needed, and a killed process leaves no files.
#pragma once
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
  // words: the label of this process, unique to its job, rank and incarnation.
  explicit NodeMemory(std::string words) : words_(std::move(words)) {}
  ~NodeMemory();
  NodeMemory(const NodeMemory&) = delete;
  std::shared_ptr<void> share(std::size_t bytes);  // throws Error if there is not enough memory
  // The block of another process of this host; empty if there is none or it is not reachable. Valid until this object
  // is destroyed.
  std::span<std::byte> of(int process, const std::string& words, int number);

 private:
  std::string words_;
  std::mutex mutex_;
  std::vector<int> files_;  // of the shared blocks: kept open for the other processes
  std::map<std::pair<std::string, int>, std::span<std::byte>> reached_;
};

}  // namespace tandem
