// The command line, read without a library: --name value, --name=value, --flag, --help.
#include <cstdio>
#include <cstdlib>

#include "layers/options.h"

namespace tandem {

void parse_command_line(int argc, char** argv, const std::string& description, const std::vector<OptionSpec>& specs) {
  for (int i = 1; i < argc; i++) {
    std::string word = argv[i], value;
    if (word == "--help" || word == "-h") {
      std::printf("%s\n\n", description.c_str());
      for (const OptionSpec& s : specs)
        std::printf("  %-18s %s%s\n", s.name.c_str(), s.help.c_str(),
                    s.fallback.empty() ? "" : (" [" + s.fallback + "]").c_str());
      std::exit(0);
    }
    bool joined = false;
    if (std::size_t equals = word.find('='); equals != std::string::npos) {
      value = word.substr(equals + 1);
      word = word.substr(0, equals);
      joined = true;
    }
    const OptionSpec* found = nullptr;
    for (const OptionSpec& s : specs)
      if (s.name == word) found = &s;
    if (!found) throw UsageError("unknown option " + word + " (--help lists the options)");
    if (!found->flag && !joined) {
      if (i + 1 >= argc) throw UsageError(word + " needs a value");
      value = argv[++i];
    }
    if (found->flag && joined) throw UsageError(word + " takes no value");
    found->set(value);
  }
}

}  // namespace tandem
