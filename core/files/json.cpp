#include "core/files/json.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/text.h"

namespace tandem {
namespace {

// The length of the UTF-8 sequence at the head of `s`; 0 when there is none (overlong forms and surrogates are none).
std::size_t utf8_length(std::string_view s) {
  auto byte = [&](std::size_t i) { return i < s.size() ? static_cast<unsigned char>(s[i]) : 0u; };
  auto follows = [&](std::size_t i) { return (byte(i) & 0xC0) == 0x80; };
  unsigned b = byte(0);
  if (b < 0x80) return s.empty() ? 0 : 1;
  if (b >= 0xC2 && b <= 0xDF) return follows(1) ? 2 : 0;
  if ((b & 0xF0) == 0xE0) {
    unsigned low = b == 0xE0 ? 0xA0 : 0x80, high = b == 0xED ? 0x9F : 0xBF;
    return byte(1) >= low && byte(1) <= high && follows(2) ? 3 : 0;
  }
  if (b >= 0xF0 && b <= 0xF4) {
    unsigned low = b == 0xF0 ? 0x90 : 0x80, high = b == 0xF4 ? 0x8F : 0xBF;
    return byte(1) >= low && byte(1) <= high && follows(2) && follows(3) ? 4 : 0;
  }
  return 0;
}

// Builds a Json from the events of the library's parser.
class Builder : public nlohmann::json_sax<nlohmann::json> {
 public:
  Json document;

  bool null() override {
    add(Json::Kind::null);
    return true;
  }
  bool boolean(bool v) override {
    add(Json::Kind::boolean).boolean = v;
    return true;
  }
  bool number_integer(number_integer_t v) override { return number(double(v)); }
  bool number_unsigned(number_unsigned_t v) override { return number(double(v)); }
  bool number_float(number_float_t v, const string_t&) override { return number(v); }
  bool string(string_t& v) override {
    add(Json::Kind::text).text = std::move(v);
    return true;
  }
  bool binary(binary_t&) override { return false; }  // JSON has none
  bool start_object(std::size_t) override { return open(Json::Kind::object); }
  bool start_array(std::size_t) override { return open(Json::Kind::array); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t& v) override {
    if (!names_.back().insert(v).second) throw JsonError("the name " + json_quoted(v) + " comes twice");
    open_.back()->members.push_back({std::move(v), {}});
    return true;
  }
  bool parse_error(std::size_t at, const std::string& token, const nlohmann::json::exception& e) override {
    const std::string text = e.what();  // "[json.exception.parse_error.101] parse error at line 1, column 5: …"
    const std::size_t colon = text.find(": ");
    throw JsonError("at byte " + std::to_string(at > 0 ? at - 1 : 0) + ", behind '" + plain_text(token) + "'" +
                    (colon == text.npos ? "" : text.substr(colon)));
  }

 private:
  bool number(double v) {
    add(Json::Kind::number).number = v;
    return true;
  }
  Json& add(Json::Kind kind) {
    Json& v = open_.empty()                          ? document
              : open_.back()->is(Json::Kind::object) ? open_.back()->members.back().value
                                                     : open_.back()->items.emplace_back();
    v.kind = kind;
    return v;
  }
  bool open(Json::Kind kind) {
    if (open_.size() >= 100) throw JsonError("nested deeper than 100");
    open_.push_back(&add(kind));
    names_.emplace_back();
    return true;
  }
  bool close() {
    open_.pop_back();
    names_.pop_back();
    return true;
  }

  std::vector<Json*> open_;                             // a value's items change only while it is the last of these
  std::vector<std::unordered_set<std::string>> names_;  // of each object's members
};

}  // namespace

const Json* Json::find(std::string_view name) const {
  for (const auto& [n, v] : members)
    if (n == name) return &v;
  return nullptr;
}

Json Json::parse(std::string_view text) {
  Builder builder;
  nlohmann::json::sax_parse(text, &builder);
  return std::move(builder.document);
}

bool is_utf8(std::string_view text) {
  while (const std::size_t n = utf8_length(text)) text.remove_prefix(n);
  return text.empty();
}

std::string plain_text(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const std::size_t n = utf8_length(text);
    const unsigned char c = static_cast<unsigned char>(text[0]);
    if (n == 0 || c < 0x20 || c == 0x7f)
      out += printed("%%%02X", c);
    else
      out += text.substr(0, n);
    text.remove_prefix(std::max<std::size_t>(1, n));
  }
  return out;
}

std::string json_quoted(std::string_view text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::string json_number(double v) { return std::isfinite(v) ? digits(v, 7) : "null"; }

}  // namespace tandem
