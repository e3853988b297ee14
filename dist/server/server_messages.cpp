#include "dist/server/server_messages.h"

#include <cstring>

#include "core/error.h"

namespace tandem {

std::string joined(const std::vector<std::string>& texts) {
  std::string all;
  for (const std::string& text : texts) {
    const std::uint64_t size = text.size();
    all.append(reinterpret_cast<const char*>(&size), sizeof size).append(text);
  }
  return all;
}

std::vector<std::string> parted(const std::string& all) {
  std::vector<std::string> texts;
  for (std::size_t at = 0; at < all.size();) {
    std::uint64_t size = 0;
    if (all.size() - at >= sizeof size) std::memcpy(&size, all.data() + at, sizeof size), at += sizeof size;
    require(size <= all.size() - at, "the texts of all ranks are cut short");
    texts.push_back(all.substr(at, size));
    at += size;
  }
  return texts;
}

}  // namespace tandem
