#include "core/files/json.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <unordered_set>

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

void append_utf8(std::string& out, unsigned code) {
  if (code < 0x80) {
    out += char(code);
  } else if (code < 0x800) {
    out += char(0xC0 | code >> 6);
    out += char(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    out += char(0xE0 | code >> 12);
    out += char(0x80 | (code >> 6 & 0x3F));
    out += char(0x80 | (code & 0x3F));
  } else {
    out += char(0xF0 | code >> 18);
    out += char(0x80 | (code >> 12 & 0x3F));
    out += char(0x80 | (code >> 6 & 0x3F));
    out += char(0x80 | (code & 0x3F));
  }
}

class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}
  Json document() {
    Json v = value(0);
    space();
    if (at_ != text_.size()) wrong("expected nothing more");
    return v;
  }

 private:
  [[noreturn]] void wrong(const std::string& what) const {
    throw JsonError("at byte " + std::to_string(at_) + (at_ >= text_.size() ? " (the end): " : ": ") + what);
  }
  void space() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\t' || text_[at_] == '\n' || text_[at_] == '\r'))
      at_++;
  }
  bool take(char c) {
    space();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    at_++;
    return true;
  }
  bool word(std::string_view w) {
    if (text_.substr(at_, w.size()) != w) return false;
    at_ += w.size();
    return true;
  }

  Json value(int depth) {
    if (depth > 100) wrong("nested deeper than 100");
    space();
    Json v;
    if (take('{')) {
      v.kind = Json::Kind::object;
      std::unordered_set<std::string> names;
      if (take('}')) return v;
      do {
        space();
        std::string name = string();
        if (!names.insert(name).second) wrong("the name " + json_quoted(name) + " comes twice");
        if (!take(':')) wrong("expected ':' after a name");
        v.members.push_back({std::move(name), value(depth + 1)});
      } while (take(','));
      if (!take('}')) wrong("expected ',' or '}'");
    } else if (take('[')) {
      v.kind = Json::Kind::array;
      if (take(']')) return v;
      do v.items.push_back(value(depth + 1));
      while (take(','));
      if (!take(']')) wrong("expected ',' or ']'");
    } else if (at_ < text_.size() && text_[at_] == '"') {
      v.kind = Json::Kind::text;
      v.text = string();
    } else if (word("true")) {
      v.kind = Json::Kind::boolean;
      v.boolean = true;
    } else if (word("false")) {
      v.kind = Json::Kind::boolean;
    } else if (!word("null")) {
      v.kind = Json::Kind::number;
      v.number = number();
    }
    return v;
  }

  // JSON's numbers are narrower than from_chars': no leading zeros, no "inf", a digit on both sides of the point.
  double number() {
    std::size_t end = at_;
    auto digits = [&] {
      std::size_t first = end;
      while (end < text_.size() && text_[end] >= '0' && text_[end] <= '9') end++;
      return end - first;
    };
    if (end < text_.size() && text_[end] == '-') end++;
    std::size_t whole = end, n = digits();
    if (n == 0 || (n > 1 && text_[whole] == '0')) wrong("expected a value");
    if (end < text_.size() && text_[end] == '.') {
      end++;
      if (digits() == 0) wrong("a number ends in '.'");
    }
    if (end < text_.size() && (text_[end] == 'e' || text_[end] == 'E')) {
      end++;
      if (end < text_.size() && (text_[end] == '+' || text_[end] == '-')) end++;
      if (digits() == 0) wrong("a number has an empty exponent");
    }
    double v = 0;
    if (std::from_chars(text_.data() + at_, text_.data() + end, v).ec != std::errc())
      wrong("a number is too large or too small");
    at_ = end;
    return v;
  }

  unsigned hex4() {
    unsigned code = 0;
    if (at_ + 4 > text_.size()) wrong("\\u needs four hexadecimal digits");
    auto [end, error] = std::from_chars(text_.data() + at_, text_.data() + at_ + 4, code, 16);
    if (error != std::errc() || end != text_.data() + at_ + 4) wrong("\\u needs four hexadecimal digits");
    at_ += 4;
    return code;
  }

  std::string string() {
    if (at_ >= text_.size() || text_[at_] != '"') wrong("expected '\"'");
    at_++;
    std::string out;
    while (true) {
      if (at_ >= text_.size()) wrong("a string does not end");
      unsigned char c = static_cast<unsigned char>(text_[at_]);
      if (c == '"') {
        at_++;
        return out;
      }
      if (c < 0x20) wrong("a control character in a string");
      if (c != '\\') {
        std::size_t n = utf8_length(text_.substr(at_));
        if (n == 0) wrong("a string is not UTF-8");
        out += text_.substr(at_, n);
        at_ += n;
        continue;
      }
      at_++;
      char e = at_ < text_.size() ? text_[at_++] : '\0';
      static constexpr std::string_view from = "\"\\/bfnrt", to = "\"\\/\b\f\n\r\t";
      if (std::size_t i = from.find(e); e && i != from.npos) {
        out += to[i];
      } else if (e == 'u') {
        unsigned code = hex4();
        if (code >= 0xD800 && code < 0xDC00) {  // the first half of a pair
          unsigned low = word("\\u") ? hex4() : 0;
          if (low < 0xDC00 || low > 0xDFFF) wrong("half of a surrogate pair");
          code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
        } else if (code >= 0xDC00 && code < 0xE000) {
          wrong("half of a surrogate pair");
        }
        append_utf8(out, code);
      } else {
        wrong("unknown escape");
      }
    }
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

}  // namespace

const Json* Json::find(std::string_view name) const {
  for (const auto& [n, v] : members)
    if (n == name) return &v;
  return nullptr;
}

Json Json::parse(std::string_view text) { return Reader(text).document(); }

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
  std::string out = "\"";
  for (std::size_t i = 0; i < text.size();) {
    unsigned char c = static_cast<unsigned char>(text[i]);
    std::size_t n = utf8_length(text.substr(i));
    if (c == '"' || c == '\\') {
      out += '\\';
      out += char(c);
    } else if (c < 0x20) {
      out += printed("\\u%04x", c);
    } else if (n == 0) {
      out += "\xEF\xBF\xBD";
    } else {
      out += text.substr(i, n);
    }
    i += n ? n : 1;
  }
  return out + "\"";
}

std::string json_number(double v) { return std::isfinite(v) ? digits(v, 7) : "null"; }

}  // namespace tandem
