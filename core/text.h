// Conversion of numbers and lists to text, with one function for each form, and of text to numbers.
#pragma once
#include <charconv>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tandem {

[[gnu::format(printf, 1, 2)]] std::string printed(const char* format, ...);  // the output of printf, of any length
std::string digits(double v, int most = 10);       // at most that many significant digits: "0.1", "1e-05"; 17 are exact
std::string short_number(double v, int most = 4);  // for people: "0.3299", "21.5k", "1.2e-6"; "–" when not finite
std::string readable_bytes(double bytes);          // "1.5 MiB"
std::string hex(std::uint64_t v);                  // 16 hexadecimal digits
std::string hex(std::string_view bytes);           // two hexadecimal digits for each byte
std::string shell_quoted(std::string_view text);   // one word of a shell's command line: 'it'\''s'
std::vector<std::string> parts_of(const std::string& text, char between);  // "a,b," has three; "" has none

// The values as text, with `between` between two of them: joined(names, ", ") is "a, b, c".
template <class Values, class Text = std::identity>
std::string joined(const Values& values, const char* between, const Text& text = {}) {
  std::string all;
  for (bool first = true; const auto& value : values)
    all.append(std::exchange(first, false) ? "" : between).append(std::invoke(text, value));
  return all;
}

inline std::string listed(const std::vector<std::string>& names) { return joined(names, ", "); }

// The number that the whole of `text` denotes; none: `text` is not a number, or it does not fit a T.
template <class T>
std::optional<T> parsed(std::string_view text) {
  T v{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), v);
  if (error != std::errc() || end != text.data() + text.size()) return {};
  return v;
}

}  // namespace tandem
