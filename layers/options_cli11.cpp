// The command line, read by CLI11.
#include <CLI/CLI.hpp>
#include <cstdlib>
#include <map>

#include "layers/options.h"

namespace tandem {

void parse_command_line(int argc, char** argv, const std::string& description, const std::vector<OptionSpec>& specs) {
  CLI::App app(description);
  app.allow_extras(false);
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
    std::exit(app.exit(e));
  } catch (const CLI::ParseError& e) {
    throw UsageError(std::string(e.what()) + " (--help lists the options)");
  }
  for (const CLI::Option* option : app.parse_order())  // as given, so that of two the last one counts
    if (auto found = known.find(option); found != known.end()) {
      auto& [spec, used] = found->second;
      spec->set(spec->flag ? "" : option->results().at(used++));
    }
}

}  // namespace tandem
