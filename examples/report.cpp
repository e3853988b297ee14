// One page about a run, or about several side by side: build/report run1.jsonl run2.jsonl -o report.html. The metrics files of
// --metrics become one self-contained HTML file.
#include <cstdio>
#include <filesystem>

#include "core/files/files.h"
#include "layers/train/options.h"
#include "layers/export/report.h"

using namespace tandem;

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    std::vector<std::string> paths;
    std::string output, title;
    auto into = [](std::string& to) { return [&to](const std::string& value) { to = value; }; };
    parse_command_line(argc, argv, "One page about runs, side by side: report RUN.jsonl…",
                       {{"-o", "the page", "report.html", into(output)}, {"--title", "its title", "", into(title)}},
                       &paths);
    if (output.empty()) output = "report.html";
    check_replaceable("-o", output, R"(name="generator" content="Tandem")", "a page of report");
    std::error_code none;
    for (std::size_t i = 0; i < paths.size(); i++) {
      if (std::filesystem::equivalent(paths[i], output, none))
        refuse("-o ", output, " would overwrite a run that is to be read");
      for (std::size_t k = 0; k < i; k++)
        if (std::filesystem::equivalent(paths[i], paths[k], none))
          refuse(paths[k], " and ", paths[i], " are the same run: name it once");
    }
    if (paths.empty()) refuse("which runs? Name the files that they wrote with --metrics");

    std::vector<RunLog> runs;
    std::vector<std::string> labels = labels_of(paths);
    for (std::size_t i = 0; i < paths.size(); i++) {
      runs.push_back(read_run(paths[i]));
      runs.back().label = labels[i];
      for (const std::string& remark : runs.back().remarks)
        std::fprintf(stderr, "%s%s\n", remark.starts_with(paths[i]) ? "" : (paths[i] + ": ").c_str(), remark.c_str());
    }
    if (title.empty()) title = runs.size() == 1 ? labels[0] : counted(std::int64_t(runs.size()), "run");
    write_file(output, report_page(runs, title));
    std::printf("%s: %s\n", output.c_str(), counted(std::int64_t(runs.size()), "run").c_str());
  });
}
