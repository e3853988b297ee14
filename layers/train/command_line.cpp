// The command line: --name value, --name=value, --flag, --help, --version.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iostream>

#include "core/build_info.h"
#include "layers/train/options.h"

namespace tandem {
namespace {

[[noreturn]] void end_after_help() {  // exit status 0, or 1 if the text could not be printed
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

}  // namespace

GivenOptions parse_command_line(int argc, char** argv, const std::string& description,
                                const std::vector<OptionSpec>& specs, std::vector<std::string>* words) {
  auto find = [&](const std::string& name) { return std::ranges::find(specs, name, &OptionSpec::name); };
  std::vector<std::pair<const OptionSpec*, std::string>> given;  // in the order of the command line
  std::vector<std::string> unknown;
  for (int i = 1; i < argc; i++) {
    const std::string word = argv[i], name = word.substr(0, word.find('='));
    if (word == "--help" || word == "-h") {
      print_help(argv[0], description, specs);
      end_after_help();
    }
    const auto spec = find(name);
    if (spec == specs.end()) {
      unknown.push_back(word);
      continue;
    }
    const bool joined = name.size() < word.size();
    if (spec->flag ? joined : !joined && i + 1 == argc) refuse_value(*spec);
    given.emplace_back(&*spec, spec->flag ? "" : joined ? word.substr(name.size() + 1) : argv[++i]);
  }
  for (const auto& [spec, value] : given)  // if a value is missing, the next option's name was taken for it
    if (!spec->flag && (value.empty() || value.starts_with("--") || find(value) != specs.end())) refuse_value(*spec);
  for (const std::string& word : unknown) {
    const bool dashes = word.starts_with("-");
    if (word == "--version") {
      std::printf("%s\n", build_info());
      end_after_help();
    }
    if (!words || dashes)
      throw UsageError((dashes ? "unknown option " + word.substr(0, word.find('=')) : "unexpected argument " + word) +
                       (word.starts_with("--strategy") ? ": it is tandem-run's, and stands before the program"
                        : specs.empty()                ? ": this program takes none"
                                                       : " (--help lists the options)"));
    words->push_back(word);
  }
  GivenOptions seen;
  for (const auto& [spec, value] : given) {
    const auto [first, fresh] = seen.emplace(spec->name, value);
    if (!fresh && !spec->flag && !spec->repeats)
      throw UsageError(spec->name + " is given twice (" + first->second + " and " + value + ")");
  }
  for (const auto& [name, value] : seen)
    if (name.starts_with("--no-") && seen.count("--" + name.substr(5)))
      throw UsageError("--" + name.substr(5) + " and " + name + " contradict each other");
  for (const auto& [spec, value] : given) spec->set(value);
  return seen;
}

}  // namespace tandem
