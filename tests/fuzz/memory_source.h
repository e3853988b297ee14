// Bytes that are in memory, for readers of files.
#pragma once
#include <algorithm>
#include <cstring>
#include <span>

#include "datasets/bytes.h"

namespace tandem::test {

// The bytes stay where they are; `name` stands for the path in errors. Nothing is decompressed.
class MemorySource : public ByteSource {
 public:
  MemorySource(std::span<const std::uint8_t> bytes, const char* name, const std::string& remedy)
      : ByteSource(name, remedy), left_(bytes), size_(bytes.size()) {}
  std::uint64_t at_most() const override { return size_; }
  std::size_t read_some(void* to, std::size_t bytes) override {
    const std::size_t got = std::min(bytes, left_.size());
    if (got) std::memcpy(to, left_.data(), got);
    left_ = left_.subspan(got);
    return got;
  }

 private:
  std::span<const std::uint8_t> left_;
  std::uint64_t size_;
};

}  // namespace tandem::test
