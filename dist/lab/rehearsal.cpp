#include "dist/lab/rehearsal.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>

#include "core/error.h"
#include "core/files/files.h"
#include "core/files/json.h"
#include "core/text.h"

namespace tandem {
namespace {

// ---- one run -------------------------------------------------------------------------------------------------------------
// A folder that is removed at the end.
class Scratch {
 public:
  Scratch() {
    std::string pattern = (std::filesystem::temp_directory_path() / "rehearsal-XXXXXX").string();
    if (!mkdtemp(pattern.data())) fail(pattern, ": ", std::strerror(errno));
    folder_ = pattern;
  }
  ~Scratch() {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  Scratch(const Scratch&) = delete;
  std::string operator/(const char* name) const { return (folder_ / name).string(); }

 private:
  std::filesystem::path folder_;
};

// Runs a command with its output in a file. The exit status. Ctrl-C reaches the command, which clears up; then this program ends too.
int run(const std::vector<std::string>& command, const std::vector<std::string>& environment, const std::string& output) {
  std::vector<char*> arguments;
  for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  const pid_t child = fork();
  if (child < 0) fail("no new process: ", std::strerror(errno));
  if (child == 0) {
    const int file = open(output.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
    if (file < 0 || dup2(file, 1) < 0 || dup2(file, 2) < 0) _exit(126);
    for (const std::string& setting : environment) putenv(const_cast<char*>(setting.c_str()));
    execvp(arguments[0], arguments.data());
    _exit(127);
  }
  const auto before = std::signal(SIGINT, SIG_IGN);
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  std::signal(SIGINT, before);
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  if (code == 130) std::raise(SIGINT);
  return code;
}

double number_in(const Json& line, const char* name) {
  const Json* v = line.find(name);
  return v && v->is(Json::Kind::number) ? v->number : 0;
}

void read_metrics(const std::string& file, double target, RehearsedRun& r) {
  std::istringstream lines(read_file(file));
  bool ended = false;
  double trained = 0;
  for (std::string text; std::getline(lines, text);) {
    const Json line = Json::parse(text);
    const Json* event = line.find("event");
    if (!event) continue;
    if (event->text == "epoch") {
      trained += number_in(line, "seconds");
      if (line.find("test_accuracy")) r.accuracy = number_in(line, "test_accuracy");
      if (target > 0 && !r.reached && r.accuracy && *r.accuracy >= target) r.reached = trained;
    } else if (event->text == "end") {
      ended = true;
      r.seconds = number_in(line, "seconds"), r.exposed = number_in(line, "exposed_seconds"), r.steps = number_in(line, "steps");
    }
  }
  if (!ended) fail("the program's metrics have no end: it did not train to its end, or does not know --metrics");
}

double most_sent(const std::string& file) {  // lines: host, bytes out, bytes in
  std::istringstream lines(read_file(file));
  double most = 0;
  std::string host;
  for (double out, in; lines >> host >> out >> in;) most = std::max(most, out);
  return most;
}

// ---- the model -----------------------------------------------------------------------------------------------------------
struct Overlap {
  double beside, after;  // o and b of rehearsal.h
};
Overlap overlap_of(const std::string& strategy) {
  auto is = [&](const char* word) { return strategy.find(word) != std::string::npos; };
  constexpr double backward = 2.0 / 3;  // of a step: two products for each one forward
  if (is("naive")) return {0, 1};
  if (is("daso") || is("cocod") || is("stream=")) return {1, 0};
  if (is("local-sgd") || is("outer") || is("easgd")) return {0, 1};
  if (is("all-reduce")) return {backward, 0};
  return {backward, 0.5};  // a parameter server
}

const RehearsedRun* find(const std::vector<RehearsedRun>& runs, const std::string& strategy, const std::string& link) {
  for (const RehearsedRun& r : runs)
    if (r.strategy == strategy && r.link == link) return &r;
  return nullptr;
}

// The fastest on this link of those that are accurate enough; null: none ran.
const RehearsedRun* fastest(const std::vector<RehearsedRun>& runs, const std::string& link) {
  const RehearsedRun *base = find(runs, "all-reduce", link), *best = nullptr;
  auto time = [](const RehearsedRun& r) { return r.reached.value_or(r.seconds); };
  for (const RehearsedRun& r : runs) {
    if (r.link != link) continue;
    if (base && base->accuracy && r.accuracy.value_or(0) < *base->accuracy - 0.003) continue;
    if (base && base->reached && !r.reached) continue;
    if (!best || time(r) < time(*best)) best = &r;
  }
  return best;
}

std::string grid(const std::vector<RehearsedRun>& runs, const Rehearsal& rehearsal) {
  std::string out = "\nseconds, predicted / measured\n" + printed("%-26s", "strategy");
  for (const std::string& link : rehearsal.links) out += printed("%18s", link.c_str());
  out += "\n";
  for (const std::string& strategy : rehearsal.strategies) {
    const RehearsedRun* unlimited = find(runs, strategy, "none");
    out += printed("%-26s", strategy.c_str());
    for (const std::string& link : rehearsal.links) {
      const RehearsedRun* r = find(runs, strategy, link);
      const std::string measured = r ? printed("%.1f", r->seconds) : "-";
      out += printed("%18s", (link == "none" || !unlimited ? measured : printed("%.1f / ", predicted_seconds(*unlimited, link)) + measured).c_str());
    }
    out += "\n";
  }
  return out;
}

}  // namespace

RehearsedRun rehearse(const Rehearsal& rehearsal, const std::string& strategy, const std::string& link) {
  const Scratch scratch;
  RehearsedRun r;
  r.setup = setup_of(rehearsal), r.strategy = strategy, r.link = link;
  std::vector<std::string> command{"sh", rehearsal.hosts_script, std::to_string(rehearsal.hosts), link, "--"};
  command.insert(command.end(), rehearsal.program.begin(), rehearsal.program.end());
  command.insert(command.end(), {"--metrics", scratch / "metrics"});
  std::vector<std::string> settings{"RANKS=" + std::to_string(rehearsal.ranks), "COUNTERS=" + (scratch / "counters"),
                                    "TANDEM_STRATEGY=" + strategy.substr(strategy.find('/') + 1), "DELAY=" + printed("%g", rehearsal.delay)};
  if (strategy.find('/') != strategy.npos) settings.push_back(strategy.substr(0, strategy.find('/')));
  if (rehearsal.pace > 0) settings.push_back("TANDEM_PACE=" + printed("%g:0", rehearsal.pace));
  const int status = run(command, settings, scratch / "said");
  const std::string said = read_file(scratch / "said"), end = said.substr(said.size() - std::min<std::size_t>(said.size(), 1500));
  if (status == 77) refuse("hosts cannot be laid out here: ", end);
  if (status != 0) fail(strategy, " on ", link, " ended with status ", status, ":\n", end);
  read_metrics(scratch / "metrics", rehearsal.target, r);
  r.bytes = most_sent(scratch / "counters");
  return r;
}

std::string setup_of(const Rehearsal& r) {
  std::string text = printed("%d hosts × %d ranks", r.hosts, r.ranks);
  if (r.delay > 0) text += printed(", delay %g ms", r.delay);
  if (r.pace > 0) text += printed(", a step in %g ms", r.pace);
  if (r.target > 0) text += printed(", to %g %%", 100 * r.target);
  for (const std::string& word : r.program) text += " " + shell_quoted(word);
  return text;
}

double bytes_per_second(const std::string& link) {
  if (link == "none") return std::numeric_limits<double>::infinity();
  for (const auto& [unit, factor] : {std::pair{"gbit", 1e9}, {"mbit", 1e6}, {"kbit", 1e3}})
    if (link.ends_with(unit))
      if (const auto v = parsed<double>(link.substr(0, link.size() - 4)); v && *v > 0 && std::isfinite(*v)) return *v * factor / 8;
  refuse("a link of ", link, ": expected a rate like 200mbit or 1gbit, or none");
}

double predicted_seconds(const RehearsedRun& unlimited, const std::string& link) {
  const double wire = unlimited.bytes / bytes_per_second(link);
  const Overlap o = overlap_of(unlimited.strategy);
  return unlimited.seconds + std::max(0.0, (1 - o.after) * wire - o.beside * unlimited.seconds) + o.after * wire;
}

int steps_between(const RehearsedRun& all_reduce, const std::string& link, double share) {
  const double exchange = all_reduce.bytes / std::max(1.0, all_reduce.steps) / bytes_per_second(link);
  const double step = all_reduce.seconds / std::max(1.0, all_reduce.steps);
  return std::max(1, int(std::ceil(exchange * (1 - share) / (share * step))));
}

std::string rehearsal_table(const std::vector<RehearsedRun>& runs, const Rehearsal& rehearsal) {
  std::string out = printed("%-26s", "strategy") + "       link   seconds   exposed    MB a host   test accuracy";
  if (rehearsal.target > 0) out += printed("   s to %.3g %%", 100 * rehearsal.target);
  out += "\n";
  for (const RehearsedRun& r : runs) {
    out += printed("%-26s", r.strategy.c_str()) + printed("%11s %9.1f %9.1f %12.1f", r.link.c_str(), r.seconds, r.exposed, r.bytes / 1e6);
    out += r.accuracy ? printed("%14.2f %%", 100 * *r.accuracy) : printed("%16s", "-");
    if (rehearsal.target > 0) out += r.reached ? printed("%13.1f", *r.reached) : printed("%13s", "-");
    out += "\n";
  }
  if (rehearsal.links.size() > 1) out += grid(runs, rehearsal);
  const RehearsedRun* base = find(runs, "all-reduce", "none");
  for (const std::string& link : rehearsal.links) {
    const RehearsedRun* best = fastest(runs, link);
    if (!best) continue;
    out += "on " + link + ": " + best->strategy;
    if (base && link != "none") out += printed("; exchanges of all weights take 5 %% of the time with H = %d", steps_between(*base, link));
    out += "\n";
  }
  return out;
}

std::string line_of(const RehearsedRun& r) {
  auto maybe = [](const std::optional<double>& v) { return v ? json_number(*v) : std::string("null"); };
  return "{\"setup\":" + json_quoted(r.setup) + ",\"strategy\":" + json_quoted(r.strategy) + ",\"link\":" + json_quoted(r.link) + ",\"seconds\":" + json_number(r.seconds) +
         ",\"exposed\":" + json_number(r.exposed) + ",\"bytes\":" + json_number(r.bytes) + ",\"steps\":" + json_number(r.steps) +
         ",\"accuracy\":" + maybe(r.accuracy) + ",\"reached\":" + maybe(r.reached) + "}\n";
}

RehearsedRun run_of(const std::string& line) {
  const Json j = Json::parse(line);
  auto text = [&](const char* name) { return j.find(name) ? j.find(name)->text : std::string(); };
  auto maybe = [&](const char* name) {
    const Json* v = j.find(name);
    return v && v->is(Json::Kind::number) ? std::optional(v->number) : std::nullopt;
  };
  RehearsedRun r;
  r.setup = text("setup"), r.strategy = text("strategy"), r.link = text("link");
  if (r.strategy.empty() || r.link.empty()) fail("this is no line of a rehearsal: ", line);
  r.seconds = number_in(j, "seconds"), r.exposed = number_in(j, "exposed"), r.bytes = number_in(j, "bytes"), r.steps = number_in(j, "steps");
  r.accuracy = maybe("accuracy"), r.reached = maybe("reached");
  return r;
}

}  // namespace tandem
