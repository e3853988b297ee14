// JSON, read: one document or one line of it. What the library writes itself (metrics, traces) is written where it is
// made.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"

namespace tandem {

struct JsonMember;
struct JsonError : Error {
  using Error::Error;
};

// A value of a document. Objects keep the order of their members; numbers are doubles (exact for whole numbers up to
// 2⁵³).
struct Json {
  enum class Kind { null, boolean, number, text, array, object } kind = Kind::null;
  bool boolean = false;
  double number = 0;
  std::string text;
  std::vector<Json> items;          // of an array
  std::vector<JsonMember> members;  // of an object; a name that comes twice is refused

  const Json* find(std::string_view name) const;  // a member, or null
  bool is(Kind k) const { return kind == k; }

  // The whole of `text` is one value, with space around it. Throws JsonError: "at byte 17: expected ':' after a name".
  // Nesting deeper than 100 is refused; so are bytes that are not UTF-8 inside strings.
  static Json parse(std::string_view text);
};
struct JsonMember {
  std::string name;
  Json value;
};

bool is_utf8(std::string_view text);
std::string plain_text(std::string_view text);   // UTF-8: other bytes and control characters become %81, %0A, …
std::string json_quoted(std::string_view text);  // "…", what needs it escaped; bytes that are not UTF-8 become U+FFFD
std::string json_number(double v);  // seven digits; null for what is not finite, which is all that JSON has

}  // namespace tandem
