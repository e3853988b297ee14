// JSON: parses a document; formats text and numbers for code that writes JSON (metrics, traces).
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "core/error.h"

namespace tandem {

struct JsonError : Error {
  using Error::Error;
};

// Parses `text`, which must be one value, with space around it. Objects keep the order of their members. Throws
// JsonError when text is not JSON ("parse error at line 1, column 6: … expected ':'"), an object has a name twice, or
// values are nested deeper than 100. Include <nlohmann/json.hpp> to use the result.
nlohmann::ordered_json parse_json(std::string_view text);

bool is_utf8(std::string_view text);
std::string plain_text(std::string_view text);   // UTF-8: other bytes and control characters become %81, %0A, …
std::string json_quoted(std::string_view text);  // "…" with escapes; bytes that are not UTF-8 become U+FFFD
std::string json_number(double v);  // seven digits; null if v is not finite, since JSON has no such numbers

}  // namespace tandem
