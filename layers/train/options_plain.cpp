// The command line, read without a library: --name value, --name=value, --flag, --help.
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "layers/train/options.h"

namespace tandem {

void parse_command_line(int argc, char** argv, const std::string& description, const std::vector<OptionSpec>& specs,
                        std::vector<std::string>* words) {
  CommandLine line;
  for (int i = 1; i < argc; i++) {
    const std::string word = argv[i], name = word.substr(0, word.find('='));
    if (word == "--help" || word == "-h") {
      std::printf("%s\n\n", description.c_str());
      for (const OptionSpec& s : specs)
        std::printf("  %-18s %s%s\n", s.name.c_str(), s.help.c_str(),
                    s.fallback.empty() ? "" : (" [" + s.fallback + "]").c_str());
      std::printf("\n%s\n", version_help);
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
  set_options(specs, line, words);
}

}  // namespace tandem
