// The command line: --name value, --name=value, --flag, --help, --version.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <map>

#include "core/build_info.h"
#include "layers/train/options.h"

namespace tandem {
namespace {

struct CommandLine {
  std::vector<std::pair<const OptionSpec*, std::string>> given;  // in the order of the command line
  std::vector<std::string> unknown;                              // words that belong to no option, in that order
};

[[noreturn]] void end_after_help() {  // 0, or 1 where it could not be printed
  std::cout.flush();
  std::exit(std::fflush(stdout) != 0 || std::ferror(stdout) || !std::cout ? 1 : 0);
}

[[noreturn]] void refuse_value(const OptionSpec& spec) {
  throw UsageError(spec.name + (spec.flag ? " takes no value" : " needs a value"));
}

void print_help(const char* program, const std::string& description, const std::vector<OptionSpec>& specs) {
  std::printf("%s\nUsage: %s [OPTIONS]\n\nOptions:\n", description.c_str(), program);
  std::printf("  %-26s  %s\n", "-h,--help", "Print this help message and exit");
  for (const OptionSpec& s : specs)
    std::printf("  %-26s  %s\n", (s.name + (s.fallback.empty() ? "" : "=" + s.fallback)).c_str(), s.help.c_str());
  std::printf("\n--version tells what this build is.\n");
}

// Parses the words. Handles --help.
CommandLine split(int argc, char** argv, const std::string& description, const std::vector<OptionSpec>& specs) {
  CommandLine line;
  for (int i = 1; i < argc; i++) {
    const std::string word = argv[i], name = word.substr(0, word.find('='));
    if (word == "--help" || word == "-h") {
      print_help(argv[0], description, specs);
      end_after_help();
    }
    auto spec = std::find_if(specs.begin(), specs.end(), [&](const OptionSpec& s) { return s.name == name; });
    const bool joined = name.size() < word.size();
    if (spec == specs.end()) {
      line.unknown.push_back(word);
    } else if (spec->flag) {
      if (joined) refuse_value(*spec);
      line.given.emplace_back(&*spec, "");
    } else {
      if (!joined && ++i == argc) refuse_value(*spec);
      line.given.emplace_back(&*spec, joined ? word.substr(name.size() + 1) : argv[i]);
    }
  }
  return line;
}

// Handles --version, and refuses remaining words when the program takes none.
void take_words(const CommandLine& line, bool no_options, std::vector<std::string>* words) {
  for (const std::string& word : line.unknown) {
    if (word == "--version") {
      std::printf("%s\n", build_info());
      end_after_help();
    }
    if (words && !word.starts_with("-")) {
      words->push_back(word);
      continue;
    }
    throw UsageError(
        (word.starts_with("-") ? "unknown option " + word.substr(0, word.find('=')) : "unexpected argument " + word) +
        (no_options ? ": this program takes none" : " (--help lists the options)"));
  }
}

}  // namespace

void parse_command_line(int argc, char** argv, const std::string& description, const std::vector<OptionSpec>& specs,
                        std::vector<std::string>* words) {
  const CommandLine line = split(argc, argv, description, specs);
  auto named = [&](const std::string& word) {
    return std::any_of(specs.begin(), specs.end(), [&](const OptionSpec& s) { return s.name == word; });
  };
  for (const auto& [spec, value] : line.given)  // a value left out has the next option's name put in its place
    if (!spec->flag && (value.empty() || value.starts_with("--") || named(value))) refuse_value(*spec);
  take_words(line, specs.empty(), words);
  std::map<std::string, std::string> seen;
  for (const auto& [spec, value] : line.given) {
    auto [first, fresh] = seen.emplace(spec->name, value);
    if (!fresh && !spec->flag && !spec->repeats)
      throw UsageError(spec->name + " is given twice (" + first->second + " and " + value + ")");
  }
  for (const auto& [name, value] : seen)
    if (name.starts_with("--no-") && seen.count("--" + name.substr(5)))
      throw UsageError("--" + name.substr(5) + " and " + name + " contradict each other");
  for (const auto& [spec, value] : line.given) spec->set(value);
}

}  // namespace tandem
