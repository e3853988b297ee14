// Descriptions of options, each made from one field of a program: its name, its text, and what it may be.
//
//   OptionRows own;
//   own.number("--ranks", ranks, 1, 1000, "how many train together");
//   RunConfig o = parse_options(argc, argv, "…", defaults, accepted, own.all);
#pragma once
#include <algorithm>

#include "core/text.h"
#include "layers/train/run_config.h"

namespace tandem {

// Each call appends a row for a field that must outlive it; the default is the field's present value. Bad values are
// refused by name: "--val x: expected a whole number from 0 to 1000000000".
struct OptionRows {
  using Decides = OptionSpec::Decides;
  static constexpr int large = 1'000'000'000;
  std::vector<OptionSpec> all;

  // check throws Error on a bad value.
  OptionSpec& text(const std::string& name, std::string& field, const std::string& help, Decides decides = {},
                   std::function<void(const std::string&)> check = {});
  OptionSpec& flag(const std::string& name, bool& field, bool value, const std::string& help, Decides decides = {});
  OptionSpec& add(OptionSpec row, Decides decides = {}, std::function<std::string()> value = {});

  template <class T>
  static T parse(const std::string& name, const std::string& text, T low, T high, const std::string& expected) {
    const auto v = parsed<T>(text);
    if (!v || !(*v >= low && *v <= high)) refuse(name, " ", text, ": expected ", expected);
    return *v;
  }
  template <class T>
  OptionSpec& number(const std::string& name, T& field, std::type_identity_t<T> low, std::type_identity_t<T> high,
                     const std::string& help, Decides decides = {}, const std::string& also = "") {
    auto text_of = [](T v) {
      if constexpr (std::is_floating_point_v<T>)
        return digits(v);
      else
        return std::to_string(v);
    };
    const std::string kind = std::is_floating_point_v<T> ? "a number from " : "a whole number from ";
    auto set = [=, &field](const std::string& v) {
      field = parse<T>(name, v, low, high, kind + text_of(low) + " to " + text_of(high) + also);
    };
    return add({name, help, text_of(field), set}, decides, [=, &field] { return text_of(field); });
  }
  // One of these values, each written as name_of() prints it.
  template <class T>
  OptionSpec& choice(const std::string& name, T& field, const std::vector<T>& values, const std::string& help,
                     Decides decides = {}) {
    auto word_of = [](const T& value) -> std::string {
      if constexpr (std::is_same_v<T, std::string>)
        return value;
      else
        return name_of(value);
    };
    std::string words;
    for (const T& value : values)
      words.append(words.empty() ? "" : &value == &values.back() ? " or " : ", ").append(word_of(value));
    auto set = [=, &field](const std::string& v) {
      const auto chosen = std::ranges::find(values, v, word_of);
      if (chosen == values.end()) refuse(name, " ", v, ": expected ", words);
      field = *chosen;
    };
    return add({name, help, word_of(field), set}, decides, [=, &field] { return word_of(field); });
  }
};

}  // namespace tandem
