// JSON: reading a document, and the pieces of text of which writers (metrics, traces) are made.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "core/error.h"

namespace tandem {

struct JsonError : Error {
  using Error::Error;
};

// The whole of `text` is one value, with space around it. Objects keep the order of their members. Throws JsonError
// where text is not JSON ("parse error at line 1, column 6: … expected ':'"), a name comes twice in an object, or
// values are nested deeper than 100. Whoever reads the result includes <nlohmann/json.hpp>.
nlohmann::ordered_json parse_json(std::string_view text);

bool is_utf8(std::string_view text);
std::string plain_text(std::string_view text);   // UTF-8: other bytes and control characters become %81, %0A, …
std::string json_quoted(std::string_view text);  // "…", what needs it escaped; bytes that are not UTF-8 become U+FFFD
std::string json_number(double v);  // seven digits; null for what is not finite, which is all that JSON has

}  // namespace tandem
