// The command line, read by CLI11.
#include <CLI/CLI.hpp>
#include <cstdlib>
#include <map>

#include "layers/train/options.h"

namespace tandem {

void parse_command_line(int argc, char** argv, const std::string& description, const std::vector<OptionSpec>& specs,
                        std::vector<std::string>* words) {
  CLI::App app(description);
  app.allow_extras();
  app.footer(version_help);
  std::map<const CLI::Option*, std::pair<const OptionSpec*, std::size_t>>
      known;  // and how many of its values were used
  for (const OptionSpec& spec : specs) {
    CLI::Option* option = spec.flag ? app.add_flag(spec.name) : app.add_option(spec.name)->type_name("");
    option->description(spec.help)->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)->disable_flag_override();
    if (!spec.fallback.empty()) option->default_str(spec.fallback);
    known[option] = {&spec, 0};
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp& e) {
    app.exit(e);
    end_after_help();
  } catch (const CLI::ParseError& e) {
    const std::string text = e.what(), name = text.substr(0, text.find_first_of(": "));
    for (const OptionSpec& spec : specs)
      if (spec.name == name || spec.name == "--" + name) refuse_value(spec);  // nothing else can be wrong with text
    throw UsageError(text + " (--help lists the options)");
  }
  CommandLine line;
  for (const CLI::Option* option : app.parse_order())
    if (auto found = known.find(option); found != known.end()) {
      auto& [spec, used] = found->second;
      line.given.emplace_back(spec, spec->flag ? "" : option->results().at(used++));
    }
  line.unknown = app.remaining();
  set_options(specs, line, words);
}

}  // namespace tandem
