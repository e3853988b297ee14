#include "core/files/json.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "core/text.h"

namespace tandem {

nlohmann::ordered_json parse_json(std::string_view text) {
  using Event = nlohmann::ordered_json::parse_event_t;
  std::vector<std::set<std::string>> names;  // the member names of each open object
  const auto check = [&](int depth, Event event, const nlohmann::ordered_json& value) {
    if (depth > 100) throw JsonError("nested deeper than 100");
    if (event == Event::object_start) names.emplace_back();
    if (event == Event::object_end) names.pop_back();
    if (event == Event::key && !names.back().insert(value.get<std::string>()).second)
      throw JsonError("the name " + value.dump() + " comes twice");
    return true;
  };
  try {
    return nlohmann::ordered_json::parse(text, check);
  } catch (const nlohmann::json::exception& e) {
    const std::string what = e.what();  // "[json.exception.parse_error.101] parse error at line 1, column 6: …"
    throw JsonError(what.substr(what.find(' ') + 1));
  }
}

bool is_utf8(std::string_view text) {
  try {
    nlohmann::json(text).dump();
    return true;
  } catch (const nlohmann::json::type_error&) {
    return false;
  }
}

std::string plain_text(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const auto c = static_cast<unsigned char>(text[0]);
    const std::size_t length = c < 0xC0 ? 1 : c < 0xE0 ? 2 : c < 0xF0 ? 3 : 4;  // if it begins a sequence of UTF-8
    const bool plain = c >= 0x20 && c != 0x7f && (c < 0x80 || (c >= 0xC0 && is_utf8(text.substr(0, length))));
    out += plain ? std::string(text.substr(0, length)) : printed("%%%02X", c);
    text.remove_prefix(plain ? length : 1);
  }
  return out;
}

std::string json_quoted(std::string_view text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::string json_number(double v) { return std::isfinite(v) ? digits(v, 7) : "null"; }

}  // namespace tandem
