// The command line, read by CLI11.
#include <CLI/CLI.hpp>
#include <cstdlib>

#include "layers/options.h"

namespace tandem {

void parse_command_line(int argc, char** argv, const std::string& description, const std::vector<OptionSpec>& specs) {
  CLI::App app(description);
  app.allow_extras(false);
  for (const OptionSpec& spec : specs) {
    if (spec.flag) app.add_flag_callback(spec.name, [&spec] { spec.set(""); }, spec.help);
    else {
      auto* option = app.add_option_function<std::string>(spec.name, [&spec](const std::string& v) { spec.set(v); }, spec.help);
      option->type_name("");
      if (!spec.fallback.empty()) option->default_str(spec.fallback);
    }
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp& e) {
    std::exit(app.exit(e));
  } catch (const CLI::ParseError& e) {
    throw UsageError(std::string(e.what()) + " (--help lists the options)");
  }
}

}  // namespace tandem
