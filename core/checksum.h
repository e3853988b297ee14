// A checksum of bytes: a change of any single bit changes it, since every step is a bijection of the previous state. It
// reads eight bytes at a time. Checkpoints store it, and ranks compare their checksums.
#pragma once
#include <bit>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace tandem {

class Checksum {
 public:
  void add(const void* bytes, std::size_t count) {
    const char* p = static_cast<const char*>(bytes);
    for (; count >= 8; p += 8, count -= 8) mix(p, 8);
    mix(p, count);
    hash_ = std::rotl((hash_ ^ count) * prime, 31);
  }
  void add(std::string_view text) { add(text.data(), text.size()); }
  std::uint64_t value() const { return hash_; }

 private:
  static constexpr std::uint64_t prime = 0x9E3779B97F4A7C15u;
  void mix(const char* p, std::size_t count) {
    std::uint64_t word = 0;
    std::memcpy(&word, p, count);
    hash_ = std::rotl((hash_ ^ word) * prime, 31);
  }
  std::uint64_t hash_ = 1469598103934665603u;
};

}  // namespace tandem
