#include "core/text.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <sstream>

namespace tandem {

std::string printed(const char* format, ...) {
  std::va_list values, again;
  va_start(values, format);
  va_copy(again, values);
  std::string text(std::size_t(std::vsnprintf(nullptr, 0, format, values)), '\0');
  std::vsnprintf(text.data(), text.size() + 1, format, again);
  va_end(values);
  va_end(again);
  return text;
}

std::string digits(double v, int most) { return printed("%.*g", most, v); }

std::string short_number(double v, int most) {
  if (!std::isfinite(v)) return "–";
  const double size = std::fabs(v);
  // In thousands if there are more digits before the point than allowed.
  if (size >= std::min(1e4, std::pow(10, most)) && size < 1e15) {
    const int unit = size >= 1e12 ? 4 : size >= 1e9 ? 3 : size >= 1e6 ? 2 : 1;
    return digits(v / std::pow(1e3, unit), std::max(3, most - 1)) + " kMGT"[unit];
  }
  std::string text = digits(v, most);
  if (const std::size_t e = text.find('e'); e != text.npos && text[e + 2] == '0') text.erase(e + 2, 1);  // e-06
  return text;
}

std::vector<std::string> parts_of(const std::string& text, char between) {
  std::vector<std::string> parts;
  std::istringstream in(text.empty() ? text : text + between);
  for (std::string part; std::getline(in, part, between);) parts.push_back(part);
  return parts;
}

std::string readable_bytes(double bytes) {
  const int unit = bytes >= 1024.0 * (1 << 20) ? 3 : bytes >= (1 << 20) ? 2 : bytes >= 1024 ? 1 : 0;
  const double v = bytes / std::pow(1024.0, unit);
  const int decimals = v >= 100 || unit == 0 ? 0 : v >= 10 ? 1 : 2;
  return printed("%.*f %s", decimals, v, std::array{"B", "KiB", "MiB", "GiB"}[std::size_t(unit)]);
}

std::string hex(std::uint64_t v) { return printed("%016llx", static_cast<unsigned long long>(v)); }

std::string hex(std::string_view bytes) {
  std::string s;
  for (const unsigned char c : bytes) s += printed("%02x", unsigned(c));
  return s;
}

std::string shell_quoted(std::string_view text) {
  std::string quoted = "'";
  for (const char c : text) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

}  // namespace tandem
