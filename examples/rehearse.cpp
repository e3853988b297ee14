// What each strategy would bring on a cluster: runs a training program on hosts that this machine lays out (as root), for each strategy and
// link, and prints time, bytes, exposed exchange and accuracy, predicted beside measured.
//
//   build/rehearse --hosts 4 --ranks 2 --link 200mbit --strategy 'all-reduce ddc-asgd' -- build/fashion_mnist --epochs 2
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "core/files/files.h"
#include "core/text.h"
#include "dist/lab/rehearsal.h"
#include "tandem.h"

using namespace tandem;

namespace {

struct Arguments {
  Rehearsal rehearsal;
  std::string results;
};

double number(const char* option, const std::string& text, double low, double high) {
  const auto v = parsed<double>(text);
  if (!v || !(*v >= low && *v <= high)) refuse(option, " ", text, ": expected a number from ", low, " to ", high);
  return *v;
}

int count(const char* option, const std::string& text) {
  const auto v = parsed<int>(text);
  if (!v || *v < 1 || *v > 64) refuse(option, " ", text, ": expected a whole number from 1 to 64");
  return *v;
}

Arguments arguments(int argc, char** argv) {
  Arguments a;
  Rehearsal& r = a.rehearsal;
  int own = 1;
  while (own < argc && std::string(argv[own]) != "--") own++;
  for (int i = own + 1; i < argc; i++) r.program.push_back(argv[i]);
  std::vector<std::string> words;
  parse_command_line(own, argv, "Runs a training program on pretended hosts, once for each strategy and link: rehearse [OPTIONS] -- PROGRAM …",
                     {{"--hosts", "how many", "2", [&](const std::string& v) { r.hosts = count("--hosts", v); }},
                      {"--ranks", "of each host", "1", [&](const std::string& v) { r.ranks = count("--ranks", v); }},
                      {"--link", "rate of each host's link, or several: 50mbit,1gbit; none: no limit", "none",
                       [&](const std::string& v) {
                         std::istringstream rates(v);
                         for (std::string rate; std::getline(rates, rate, ',');) bytes_per_second(rate), r.links.push_back(rate);
                       }},
                      {"--delay", "of a link, milliseconds", "0", [&](const std::string& v) { r.delay = number("--delay", v, 0, 10000); }},
                      {"--strategy", "or several, with spaces between: 'all-reduce TANDEM_WIRE=bf16/all-reduce ddc-asgd'", "all-reduce",
                       [&](const std::string& v) {
                         std::istringstream names(v);
                         for (std::string name; names >> name;) r.strategies.push_back(name);
                       }},
                      {"--pace", "milliseconds that a step takes before its exchange, where ranks share cores (0: as it comes)", "0",
                       [&](const std::string& v) { r.pace = number("--pace", v, 0, 1e6); }},
                      {"--target", "test accuracy in percent: prints the time to it", "",
                       [&](const std::string& v) { r.target = number("--target", v, 0, 100) / 100; }},
                      {"--results", "file for the runs; those that it holds are not run again (.jsonl)", "",
                       [&](const std::string& v) { a.results = v; }}},
                     &words);
  if (!words.empty() || r.program.empty()) refuse("which program? build/rehearse --hosts 2 --link 1gbit -- build/fashion_mnist --epochs 1");
  if (r.strategies.empty()) r.strategies = {"all-reduce"};
  if (r.links.empty()) r.links = {"none"};
  if (r.links.size() > 1 && std::find(r.links.begin(), r.links.end(), "none") == r.links.end())
    r.links.insert(r.links.begin(), "none");  // predictions come from it
  r.hosts_script = (std::filesystem::read_symlink("/proc/self/exe").parent_path() / "../dist/lab/hosts.sh").lexically_normal();
  if (!std::filesystem::exists(r.hosts_script)) refuse("there is no ", r.hosts_script, ": run this program where it was built");
  return a;
}

// Throws UsageError where a line is not one of rehearse.
std::vector<RehearsedRun> read_runs(const std::string& path) {
  std::vector<RehearsedRun> runs;
  if (!std::filesystem::exists(path)) return runs;
  std::istringstream lines(read_file(path));
  for (std::string line; std::getline(lines, line);) try {
      runs.push_back(run_of(line));
    } catch (const Error& e) {
      refuse(path, ":", runs.size() + 1, ": is no run of rehearse: ", e.what(), ". Remove the line, or name another file");
    }
  return runs;
}

}  // namespace

int main(int argc, char** argv) {
  return run_program(argc, argv, [&] {
    const Arguments a = arguments(argc, argv);
    const Rehearsal& r = a.rehearsal;
    std::vector<RehearsedRun> known, runs;
    std::size_t failed = 0;
    std::ofstream out;
    if (!a.results.empty()) {
      known = read_runs(a.results);
      out.open(a.results, std::ios::app);
      if (!out) refuse(cannot_write(a.results, errno));
    }
    for (const std::string& strategy : r.strategies)
      for (const std::string& link : r.links) {
        auto done = std::find_if(known.begin(), known.end(), [&](auto& k) {
          return k.strategy == strategy && k.link == link && k.setup == setup_of(r);
        });
        try {
          runs.push_back(done != known.end() ? *done : rehearse(r, strategy, link));
        } catch (const UsageError&) {
          throw;
        } catch (const Error& e) {  // it diverged, for example: the others are run
          std::fprintf(stderr, "%s\n", e.what());
          failed++;
          continue;
        }
        std::fprintf(stderr, "%s on %s: %.1f s\n", strategy.c_str(), link.c_str(), runs.back().seconds);
        if (done != known.end() || a.results.empty()) continue;
        if (!(out << line_of(runs.back()) << std::flush)) fail(cannot_write(a.results, errno));
      }
    std::printf("%s", rehearsal_table(runs, r).c_str());
    if (failed) fail(counted(failed, "run"), " of ", r.strategies.size() * r.links.size(), " failed");
  });
}
