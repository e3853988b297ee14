// Letters: the bytes of messages that have no place of their own when they come: texts, tables, what comes before its time,
// and what nobody waits for any more. Each has memory of its own from the moment at which the channel asks for it until it is
// taken.
#pragma once
#include <cstddef>
#include <map>
#include <span>
#include <utility>
#include <vector>

namespace tandem {

class Letters {
 public:
  std::span<std::byte> room(std::size_t bytes) {
    std::vector<std::byte> letter(bytes);
    const std::span<std::byte> at(letter);
    letters_[at.data()] = std::move(letter);  // its bytes stay where they are
    return at;
  }
  // What has come into that room; empty: it is none.
  std::vector<std::byte> take(std::span<std::byte> at) {
    const auto letter = at.empty() ? letters_.end() : letters_.find(at.data());
    if (letter == letters_.end()) return {};
    return std::move(letters_.extract(letter).mapped());
  }

 private:
  // What a rank was sending when it was lost is never taken; it goes with the member.
  std::map<const std::byte*, std::vector<std::byte>> letters_;
};

}  // namespace tandem
