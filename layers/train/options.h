// The command line of training programs, and the objects that they make from it.
#pragma once
#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/backend.h"
#include "core/text.h"
#include "layers/optim/optimizer.h"
#include "layers/train/fit.h"

namespace tandem {

inline constexpr const char* usual_schedule = "one-cycle";  // of programs that name no other

// Reads argv; options that are not given have the values of `defaults`. --help prints and exits with 0. Throws
// UsageError. With several ranks only rank 0 keeps its standard output, since all print the same.
// `only`: the options that this program accepts (empty: all), so that no option is accepted and ignored. `own`: further
// options of the program.
RunConfig parse_options(int argc, char** argv, const std::string& description,
                        const RunConfig& defaults = {.epochs = 8}, const std::vector<std::string>& only = {},
                        const std::vector<OptionSpec>& own = {});

// Throws UsageError for the first line of a table (option_checks.cpp) that applies: options that contradict each other
// or have no effect together, and files that would overwrite each other. parse_options calls it.
void check_options_agree(const RunConfig& options);

// The index of the host's GPU that `--device cuda` means: one GPU per rank, assigned cyclically if there are more
// ranks.
int device_of_rank(int local_rank, int devices);
// The number of CPU backend threads of a rank that shares its host's cores with other ranks; `allowed`: the number of
// cores to which its launcher has bound it.
int threads_of_rank(int local_size, int cores, int allowed);
// The backend that the options select. Throws UsageError with the cause when it is not available.
std::unique_ptr<Backend> make_backend(const RunConfig& options);

// The optimizer that the options select.
std::unique_ptr<Optimizer> make_optimizer(const RunConfig& options);

// Runs body and prints an exception as one line on stderr. Returns the exit status: 2 for a UsageError or a file that
// cannot be read, 1 for a failed run, 128 + the signal that stopped the training (130 after Ctrl-C, 143 after SIGTERM).
int run_program(int argc, char** argv, const std::function<void()>& body);

// Sets the options that were given, and returns them. --help prints and exits with 0. Throws UsageError. Words that
// belong to no option go to `words`, or are refused.
GivenOptions parse_command_line(int argc, char** argv, const std::string& description,
                                const std::vector<OptionSpec>& specs, std::vector<std::string>* words = nullptr);

// Descriptions of options, each made from one field of a program: its name, its text and its valid values.
//
//   OptionRows own;
//   own.number("--ranks", ranks, 1, 1000, "how many train together");
//   RunConfig o = parse_options(argc, argv, "…", defaults, accepted, own.all);
//
// Each call appends a row for a field that must outlive it; the default is the field's present value. Bad values are
// refused by name: "--val x: expected a whole number from 0 to 1000000000".
struct OptionRows {
  using Decides = OptionSpec::Decides;
  static constexpr int large = 1'000'000'000;
  std::vector<OptionSpec> all;

  // check throws UsageError for a bad value; the name of the option is put before its text.
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
