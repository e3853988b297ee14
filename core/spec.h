// The text form of strategies and update rules with their options: "name:key=value,key=value". A '+' is followed by the
// rule or strategy that it contains, as in "ssp:3+ddc-asgd".
#pragma once
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/text.h"

namespace tandem {

// A parsed text.
struct Spec {
  std::string name;
  std::vector<std::string> options = {};  // "H=100", "faithful"
  std::shared_ptr<Spec> inner = nullptr;

  static Spec parse(const std::string& text);
  std::string text() const;
  // Removes an option here and in `inner`. Returns its value, or its values with ',' between them.
  std::string take(const std::string& key);
};

// One option of a strategy or update rule.
struct SpecField {
  std::string key;
  std::string expects;                                 // "a whole number from 1 to 1000000"
  std::function<bool(const std::string& value)> read;  // false: the value is not as expected
  std::string value = {};                              // the current value; the default until it is read
  bool bare = false;                                   // if it is the first, the key may be omitted: "local-sgd:8"
};

// A number in [least, most]; least = above_zero: in (0, most]. `into` must outlive the field.
constexpr double above_zero = std::numeric_limits<double>::min();
template <class T>
SpecField number_field(std::string key, T& into, double least, double most) {
  const std::string kind = std::is_integral_v<T> ? "a whole number" : "a number";
  auto read = [&into, least, most](const std::string& value) {
    const auto v = parsed<T>(value);
    if (!v || !(double(*v) >= least && double(*v) <= most)) return false;
    into = *v;
    return true;
  };
  return {std::move(key),
          kind + (least == above_zero ? " above 0, up to " : " from " + digits(least) + " to ") + digits(most), read,
          digits(double(into))};
}
// "on" or "off".
template <class T>
SpecField switch_field(std::string key, T& into) {
  auto read = [&into](const std::string& value) {
    const bool on = value == "on";
    if (!on && value != "off") return false;
    into = T(on);
    return true;
  };
  return {std::move(key), "on or off", read, into ? "on" : "off"};
}
inline SpecField bare(SpecField field) {
  field.bare = true;
  return field;
}
// A key without a value.
SpecField word_field(std::string key, std::function<void()> apply);

// The options as text for the reference, with their defaults: "`H`: STEPS, from 1 (8)".
std::string described(const std::vector<SpecField>& fields);

std::string spec_name(const std::string& text);  // the part before the first ':' or '+'
// Reads the options after the name. Throws UsageError, which has the whole text and the options that the name takes.
void read_spec(const std::string& text, const std::vector<SpecField>& fields);

}  // namespace tandem
