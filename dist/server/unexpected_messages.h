// UnexpectedMessages: the bytes of messages that have no place of their own when they come: texts, tables, what comes before its time,
// and what nobody waits for any more. Each has memory of its own from the moment at which the channel asks for it until it is
// taken.
#pragma once
#include <cstddef>
#include <map>
#include <span>
#include <utility>
#include <vector>

namespace tandem {

class UnexpectedMessages {
 public:
  std::span<std::byte> room(std::size_t bytes) {
    std::vector<std::byte> message(bytes);
    const std::span<std::byte> at(message);
    unexpected_[at.data()] = std::move(message);  // its bytes stay where they are
    return at;
  }
  // What has come into that room; empty: it is none.
  std::vector<std::byte> take(std::span<std::byte> at) {
    const auto message = at.empty() ? unexpected_.end() : unexpected_.find(at.data());
    if (message == unexpected_.end()) return {};
    return std::move(unexpected_.extract(message).mapped());
  }

 private:
  // What a rank was sending when it was lost is never taken; it goes with the member.
  std::map<const std::byte*, std::vector<std::byte>> unexpected_;
};

}  // namespace tandem
