// tandem-run: starts a program as several ranks, here or over ssh, and ends them together.
//
// Every line that a rank prints begins with [rank@host]; the same error of several ranks is shown once. When a rank
// fails, the others are ended within five seconds, and the last line names the rank that failed first and how it
// failed. Nothing is left behind. With a parameter server, after the rendezvous, only a failure of rank 0, or a usage
// error (status 2) of any rank, ends the job, unless --on-failure stop is given: the others continue without a failed
// rank, which may be restarted.
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <regex>
#include <sstream>
#include <utility>

#include "core/files/files.h"
#include "core/machine.h"
#include "core/team.h"
#include "core/text.h"
#include "dist/job/hosts.h"
#include "dist/job/job.h"
#include "dist/job/rendezvous.h"
#include "dist/server/straggler_emulation.h"
#include "dist/strategies/registry.h"
#include "layers/train/fit.h"
#include "layers/train/options.h"

extern char** environ;

using namespace tandem;

namespace {

struct Command {
  int ranks = 0;  // of all hosts, once these are known
  std::string host_list, host_file;
  std::vector<Host> hosts;  // from one of these three; {"", n}: this host
  std::string ssh = "ssh", pace, slow;
  int port = 0, servers = -1, restarts = 0;  // the values if they are not given
  std::string on_failure;                    // stop or continue; empty: the strategy's default
  bool check = false;
  std::vector<std::string> program;
};

const Variables variable = process_environment();

constexpr const char* description =
    "tandem-run [-n RANKS | -H HOST:RANKS,… | --hostfile FILE] [OPTIONS] PROGRAM [ARGUMENTS]: the program as several "
    "ranks,\nwhich are ended together.";

std::vector<OptionSpec> options_of(Command& c) {
  using Set = std::function<void(const std::string&)>;
  const auto into = [](std::string& field) -> Set { return [&field](const std::string& v) { field = v; }; };
  // The ranks read these options from variables, which they inherit.
  const auto into_variable = [](const char* name) -> Set {
    return [name](const std::string& v) { setenv(name, v.c_str(), 1); };
  };
  const auto count = [](const std::string& name, int least, int most, const std::string& help, int& field,
                        const std::string& fallback = "") {
    const Set set = [=, &field](const std::string& v) {
      read_value(name + " ", v, number_field(name, field, least, most));
    };
    return OptionSpec{name, help, fallback, set};
  };
  const Set slow = [&c](const std::string& v) { c.slow += (c.slow.empty() ? "" : ",") + v; };
  const Set check = [&c](const std::string&) { c.check = true; };
  const Set list = [](const std::string&) {
    std::fputs(strategy_table().c_str(), stdout);
    std::exit(0);
  };
  std::vector<OptionSpec> all{
      count("-n", 1, 4096, "ranks on this host", c.ranks),
      {"-H", "HOST:RANKS,…: over ssh; the first host has rank 0", "", into(c.host_list)},
      {"--hostfile", "a host a line: host, host:RANKS or host slots=RANKS; # begins a comment", "", into(c.host_file)},
      {"--strategy",
       "all-reduce, local-sgd:H, outer:H=100, daso, hybrid, or a parameter server: ddc-asgd, bsp, quorum:K, "
       "machines+ddc-asgd, … (--strategies)",
       "all-reduce", into_variable("TANDEM_STRATEGY")},
      {"--strategies", "list all strategies with their options", "", list, true},
      {"--hosts-as", "emulate this number of hosts on one machine", "", into_variable("TANDEM_HOSTS_AS")},
      count("--servers", 0, 1000000, "this number of last ranks only serve (0: every rank serves a share and trains)",
            c.servers, "0"),
      {"--pace", "MS[:SHAPE]: mean milliseconds of a step, drawn from a gamma distribution", "", into(c.pace)},
      {"--slow", "RANK:FACTOR,…: multiply the step time of this rank by FACTOR; may be given again", "", slow},
      count("--restart", 0, 1000000,
            "with a parameter server, a rank other than 0 that failed is started again, up to so many times",
            c.restarts, "0"),
      count("--port", 1, 65535, "port of rank 0, with -H (default: chosen at random; on this host any free one)",
            c.port),
      {"--on-failure",
       "stop: the first rank that fails ends all; continue: it does not (default: stop; with a parameter server "
       "only rank 0 ends all)",
       "", into(c.on_failure)},
      {"--ssh", "command to use instead of ssh", "ssh", into(c.ssh)},
      {"--check", "start no program: test whether the ranks reach each other, and show their machines and transports",
       "", check, true}};
  for (OptionSpec& option : all) option.repeats = true;  // the last value counts, and so overrides a script's
  return all;
}

// The index of the program, which is after the options and their values, or of "--" before it.
int program_at(int argc, char** argv, const std::vector<OptionSpec>& options) {
  for (int i = 1; i < argc; i++) {
    const std::string word = argv[i];
    if (word == "--" || !word.starts_with("-")) return i;
    const auto option = std::ranges::find_if(options, [&](const OptionSpec& o) { return o.name == word; });
    if (option != options.end() && !option->flag) i++;
  }
  return argc;
}

Command parse(int argc, char** argv) {
  Command c;
  const std::vector<OptionSpec> options = options_of(c);
  const int at = program_at(argc, argv, options);
  parse_command_line(at, argv, description, options);
  const bool dashes = at < argc && std::string(argv[at]) == "--";
  c.program.assign(argv + at + dashes, argv + argc);
  if (c.check != c.program.empty())
    refuse(c.check ? "--check runs no program" : "which program? tandem-run -n 2 PROGRAM ARGUMENTS");
  if (int(c.ranks > 0) + int(!c.host_list.empty()) + int(!c.host_file.empty()) > 1)
    refuse("give one of -n, -H and --hostfile");
  if (!c.on_failure.empty() && c.on_failure != "stop" && c.on_failure != "continue")
    refuse("--on-failure ", c.on_failure, ": choose stop or continue");
  if (!c.host_list.empty())
    c.hosts = hosts_in_list(c.host_list);
  else if (!c.host_file.empty())
    c.hosts = for_option("--hostfile", [&] { return hosts_in_text(read_file(c.host_file), c.host_file); });
  else
    c.hosts = {{"", std::max(c.ranks, 1)}};
  if (c.host_list.empty() && c.host_file.empty() && (c.port || c.ssh != "ssh"))
    refuse(c.port ? "--port" : "--ssh", " is for ranks on several hosts: name them with -H or --hostfile");
  c.ranks = 0;
  for (const Host& h : c.hosts) c.ranks += h.slots;
  StragglerEmulation::parse(c.pace, c.slow, c.ranks);
  std::string strategy = variable("TANDEM_STRATEGY");
  if (c.servers >= 0) strategy = with_option(strategy, "servers", std::to_string(c.servers));
  if (!c.pace.empty()) strategy = with_option(strategy, "pace", c.pace);
  if (!c.slow.empty()) strategy = with_option(strategy, "slow", c.slow);
  if (!strategy.empty()) setenv("TANDEM_STRATEGY", strategy.c_str(), 1);
  Deadlines::from();  // checks them
  return c;
}

using Environment = std::vector<std::pair<std::string, std::string>>;

struct Rank {
  int number = 0, local = 0;
  Host place;
  std::string host;  // its name in messages
  Environment set;   // its own environment variables
  int restarts = 0;
  bool reported = false;  // its failure was reported and does not end the job
  pid_t pid = -1;
  int pipes[2] = {-1, -1};       // its stdout and stderr
  std::string partial[2], last;  // incomplete lines; the last line on stderr
  bool running = false;
  int status = 0;
  double ended = 0;
  bool failed() const { return !running && status != 0; }
  int code() const { return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status); }
  bool early = false;                  // it failed before the rendezvous was complete
  bool stopped_by(int signal) const {  // this signal, sent to it, has ended it
    return signal && code() == 128 + signal;
  }
  // Its last line names that rank as the cause of its failure. A usage error (status 2) has no such cause.
  bool attributes_to(int rank) const {
    return failed() && WIFEXITED(status) && code() != 2 && rank != number &&
           last.find("rank " + std::to_string(rank) + " on ") != std::string::npos;
  }
  // Its failure ends the job: the options of all ranks are wrong, the rendezvous was not complete, or it is rank 0.
  bool ends_all() const { return failed() && (number == 0 || early || code() == 2); }
  std::string how() const {
    if (WIFSIGNALED(status)) return std::string("was killed by SIG") + sigabbrev_np(WTERMSIG(status));
    return "ended with exit status " + std::to_string(code());
  }
};

volatile std::sig_atomic_t asked = 0, asked_again = 0;
int wake_pipe[2];
void on_signal(int number) {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  static volatile double first;
  const double now = double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
  if (number == SIGCHLD) {
  } else if (!asked || (warns_of_the_end(asked) && !warns_of_the_end(number))) {
    asked = number;
    first = now;
  } else if (!warns_of_the_end(number) && now - first > 0.1) {  // timeout(1) sends its one signal twice
    asked_again = number;
  }
  const int saved = errno;
  (void)!write(wake_pipe[1], "", 1);
  errno = saved;
}

class Launch {
 public:
  explicit Launch(Command command) : c_(std::move(command)) {}

  int run() {
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    require(pipe2(wake_pipe, O_CLOEXEC | O_NONBLOCK) == 0, "no more files can be opened");
    struct sigaction action {};
    action.sa_handler = on_signal;
    action.sa_flags = SA_RESTART;
    for (int s : {SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGXCPU})
      if (struct sigaction before{};
          sigaction(s, &action, &before) == 0 && before.sa_handler == SIG_IGN && s != SIGCHLD)
        std::signal(s, SIG_IGN);  // stays ignored, as under nohup or in a script's background
    std::signal(SIGPIPE, SIG_IGN);
    start_all();
    double stop_at = 0, kill_at = 0;  // seconds; 0: none
    int passed_on = 0;                // the last signal sent to the ranks
    while (std::ranges::any_of(ranks_, [](const Rank& r) { return r.running || r.pipes[0] >= 0 || r.pipes[1] >= 0; })) {
      const bool soon = goes_on_ && std::ranges::any_of(ranks_, [](const Rank& r) { return r.failed(); });
      wait(stop_at || kill_at || soon ? 50 : 1000);
      if (goes_on_ && !stop_at && !kill_at) go_on_without_the_lost();
      const bool any =
          std::ranges::any_of(ranks_, [&](const Rank& r) { return ends_job(r) && !r.stopped_by(passed_on); });
      // Waits a moment: the cause of this failure may appear later, and the ranks may still print messages about it.
      if (any && c_.on_failure != "continue" && !stop_at) stop_at = now() + 0.5;
      // When rank 0 has ended, the job ends: a rank that was just restarted would not find rank 0.
      if (goes_on_ && !ranks_[0].running && !ranks_[0].failed() && !stop_at) stop_at = now() + 5;
      if (asked != passed_on && !kill_at) {
        passed_on = asked;
        signal_all(passed_on);
        // After a warning, the batch system sends another signal when the time is over.
        if (!warns_of_the_end(passed_on)) {
          stop_at = now();
          kill_at = now() + (asked_again ? 0 : 30);
        }
      }
      if (asked_again) kill_at = std::min(kill_at, now());
      if (stop_at && !kill_at && now() >= stop_at) {
        signal_all(SIGTERM);
        kill_at = now() + 4;
      }
      if (kill_at && now() >= kill_at) kill_all(asked && !asked_again);
      const bool none = std::ranges::none_of(ranks_, [](const Rank& r) { return r.running; });
      if (none && !drained_at_) drained_at_ = now() + 0.5;
      if (drained_at_ && now() >= drained_at_) break;  // a grandchild keeps the pipes open
    }
    signal_all(SIGKILL);
    while (waitpid(-1, nullptr, WNOHANG) > 0) {}
    for (Rank& r : ranks_)
      for (int k : {0, 1}) finish_line(r, k);
    return verdict();
  }

 private:
  void start_all() {
    const auto host_of = [](const Host& h) { return h.name.empty() ? host_name() : h.name; };
    const auto slots_of = [&](const Host& h) { return host_of(h) + ":" + std::to_string(h.slots); };
    job_ = hex(random_bytes(8));
    const std::string strategy = variable("TANDEM_STRATEGY");
    const bool stops = c_.on_failure == "stop";
    goes_on_ = !stops && goes_on_without_lost_ranks(strategy);
    if (c_.restarts > 0 && (stops || !ranks_return(strategy)))
      refuse("--restart ", c_.restarts,
             stops ? ": with --on-failure stop no rank is started again: leave one of them out"
             : goes_on_
                 ? ": under machines+ and hybrid+ a host leaves as a whole, and its ranks cannot come back one at "
                   "a time: leave it out"
                 : ": only in a job of a parameter server can a rank come back (--strategy ddc-asgd)");
    // Only a rendezvous on a local socket shows when all ranks have joined. Otherwise rank 0 reports the missing ranks.
    begun_ = !goes_on_ || !here_only() || !variable("TANDEM_TOKEN").empty();
    // The ranks inherit these, also over ssh. The token can be given, because a user who restarts a rank by hand on
    // another host needs it.
    if (!here_only() && variable("TANDEM_TOKEN").empty()) setenv("TANDEM_TOKEN", hex(random_bytes(32)).c_str(), 1);
    setenv("TANDEM_JOB", job_.c_str(), 1);
    setenv("TANDEM_HOSTS", joined(c_.hosts, ",", slots_of).c_str(), 1);
    // The ranks report lost connections themselves, with names. UCX reads this variable when it is loaded.
    setenv("UCX_LOG_LEVEL", "fatal", 0);
    // Ranks that share cores also divide the threads, and waiting threads do not spin.
    setenv("OMP_WAIT_POLICY", "passive", 0);
    const bool divides_threads = !std::getenv("OMP_NUM_THREADS");
    const unsigned char draw = static_cast<unsigned char>(random_bytes(1)[0]);
    const std::string port = std::to_string(c_.port ? c_.port : 29500 + draw), &first = c_.hosts[0].name;
    for (const Host& h : c_.hosts)
      for (int local = 0; local < h.slots; local++) {
        Rank& r = ranks_.emplace_back();
        r.number = int(ranks_.size()) - 1;
        r.local = local;
        r.place = h;
        r.host = host_of(h);
        r.set = {{"RANK", std::to_string(r.number)},
                 {"WORLD_SIZE", std::to_string(c_.ranks)},
                 {"LOCAL_RANK", std::to_string(local)},
                 {"LOCAL_WORLD_SIZE", std::to_string(h.slots)}};
        if (!here_only()) {
          const std::string here = is_here(h.name) ? "127.0.0.1" : host_name();
          r.set.push_back({"MASTER_ADDR", is_here(first) ? here : first});
          r.set.push_back({"MASTER_PORT", port});
        }
        if (is_here(h.name) && divides_threads)
          r.set.push_back({"OMP_NUM_THREADS", std::to_string(std::max(1, default_threads() / h.slots))});
        start(r);
      }
  }

  bool here_only() const { return c_.hosts.size() == 1 && is_here(c_.hosts[0].name); }
  bool is_here(const std::string& host) const { return host.empty() || host == "localhost" || host == host_name(); }

  // Cores [k·c/n, (k+1)·c/n) of those that this process may use: ranks that share a core wait for each other.
  static void take_cores(int local, int ranks) {
    cpu_set_t allowed, mine;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
    const int count = CPU_COUNT(&allowed);
    if (ranks < 2 || ranks > count) return;
    CPU_ZERO(&mine);
    for (int cpu = 0, k = 0; cpu < CPU_SETSIZE; cpu++) {
      if (!CPU_ISSET(cpu, &allowed)) continue;
      if (k >= local * count / ranks && k < (local + 1) * count / ranks) CPU_SET(cpu, &mine);
      k++;
    }
    sched_setaffinity(0, sizeof mine, &mine);
  }

  // The command that runs `words` on another host.
  std::vector<std::string> over_ssh(const std::string& host, const Environment& set,
                                    const std::vector<std::string>& words) const {
    // The token is sent through standard input, because all users of a host can read command lines.
    std::string line = "cd " + shell_quoted(std::filesystem::current_path().string()) +
                       " && read -r TANDEM_TOKEN && export TANDEM_TOKEN && exec env";
    for (const auto& [name, value] : set) line += " " + name + "=" + shell_quoted(value);
    for (char** e = environ; *e; e++)
      for (const char* passed : {"TANDEM_", "UCX_", "NCCL_", "CUDA_", "OMP_", "LD_LIBRARY_PATH="})
        if (std::strncmp(*e, passed, std::strlen(passed)) == 0 && std::strncmp(*e, "TANDEM_TOKEN", 12) != 0)
          line += " " + shell_quoted(*e);
    for (const std::string& w : words) line += " " + shell_quoted(w);
    std::istringstream ssh(c_.ssh);
    std::vector<std::string> all;
    for (std::string w; ssh >> w;) all.push_back(w);
    if (c_.ssh == "ssh") all.insert(all.end(), {"-o", "BatchMode=yes", "-o", "ConnectTimeout=10"});
    all.insert(all.end(), {host, line});
    return all;
  }

  void start(Rank& r) {
    const Host& host = r.place;
    auto set = r.set;
    if (r.restarts > 0) set.push_back({"TANDEM_INCARNATION", std::to_string(r.restarts)});
    r.status = 0;
    r.reported = false;
    r.last.clear();
    std::vector<std::string> words = c_.program;
    if (c_.check)
      words = {is_here(host.name) ? "/proc/self/exe" : std::filesystem::read_symlink("/proc/self/exe").string(),
               "--check-rank"};
    const bool here = is_here(host.name);
    if (!here) words = over_ssh(host.name, set, words);
    int out[2], err[2], in[2];
    require(pipe2(out, O_CLOEXEC) == 0 && pipe2(err, O_CLOEXEC) == 0 && pipe2(in, O_CLOEXEC) == 0,
            "no more files can be opened: ulimit -n is too low for so many ranks");
    std::vector<char*> arguments;
    for (std::string& w : words) arguments.push_back(w.data());
    arguments.push_back(nullptr);
    const pid_t parent = getpid();
    r.pid = fork();
    require(r.pid >= 0, "fork: ", std::strerror(errno));
    if (r.pid == 0) {
      setpgid(0, 0);
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() != parent) _exit(127);
      dup2(in[0], 0);
      dup2(out[1], 1);
      dup2(err[1], 2);
      std::signal(SIGPIPE, SIG_DFL);
      if (here) {
        for (const auto& [name, value] : set) setenv(name.c_str(), value.c_str(), 1);
        take_cores(r.local, host.slots);
      }
      execvp(arguments[0], arguments.data());
      std::fprintf(stderr, "%s cannot be started: %s (a program of this folder: ./NAME)\n", arguments[0],
                   std::strerror(errno));
      _exit(127);
    }
    setpgid(r.pid, r.pid);
    close(in[0]);
    close(out[1]);
    close(err[1]);
    const std::string token = variable("TANDEM_TOKEN") + "\n";
    if (!here) (void)!write(in[1], token.data(), token.size());
    close(in[1]);
    r.pipes[0] = out[0];
    r.pipes[1] = err[0];
    r.running = true;
  }

  // In a job of a parameter server: reports failed ranks, and restarts them.
  void go_on_without_the_lost() {
    for (Rank& r : ranks_) {
      // Waits a moment, because a failure of rank 0 may be the cause. If the rank names rank 0 as the cause, waits
      // longer: the other ranks would report the same within that time.
      const double moment = r.attributes_to(0) ? Deadlines::from().silence : 0.2;
      if (!r.failed() || ends_job(r) || asked || ranks_[0].failed() || now() < r.ended + moment) continue;
      const bool again = r.restarts < c_.restarts && ranks_[0].running;
      if (!std::exchange(r.reported, true))
        std::fprintf(stderr, "tandem-run: rank %d on %s %s: the others go on without it%s\n", r.number, r.host.c_str(),
                     r.how().c_str(), again ? ", and it is started again" : "");
      // Its remaining output is read first.
      if (!again || (now() < r.ended + 0.5 && (r.pipes[0] >= 0 || r.pipes[1] >= 0))) continue;
      for (int k : {0, 1}) {
        finish_line(r, k);
        if (r.pipes[k] >= 0) close(std::exchange(r.pipes[k], -1));
      }
      kill(-r.pid, SIGKILL);  // processes that it may have started
      r.restarts++;
      start(r);
    }
  }

  void wait(int milliseconds) {
    std::vector<pollfd> polled{{wake_pipe[0], POLLIN, 0}};
    for (Rank& r : ranks_)
      for (int fd : r.pipes) polled.push_back({fd, POLLIN, 0});
    poll(polled.data(), polled.size(), milliseconds);
    char bytes[1 << 16];
    while (read(wake_pipe[0], bytes, sizeof bytes) > 0) {}
    for (std::size_t i = 0; i < ranks_.size(); i++)
      for (int k : {0, 1})
        if (polled[1 + 2 * i + std::size_t(k)].revents) {
          const ssize_t n = read(ranks_[i].pipes[k], bytes, sizeof bytes);
          if (n > 0)
            show(ranks_[i], k, {bytes, std::size_t(n)});
          else if (n == 0 || errno != EINTR)
            close(std::exchange(ranks_[i].pipes[k], -1));
        }
    if (!begun_) begun_ = has_begun("TANDEM_JOB=" + job_);
    int status;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;)
      for (Rank& r : ranks_)
        if (r.pid == pid && r.running) {
          r.running = false;
          r.status = status;
          r.ended = now();
          r.early = !begun_ && ranks_[0].running;
        }
  }

  void show(Rank& r, int k, std::string_view text) {
    r.partial[k] += text;
    for (std::size_t end; (end = r.partial[k].find('\n')) != std::string::npos;) {
      print(r, k, r.partial[k].substr(0, end));
      r.partial[k].erase(0, end + 1);
    }
  }
  void finish_line(Rank& r, int k) {
    if (!r.partial[k].empty()) print(r, k, r.partial[k]);
    r.partial[k].clear();
  }
  void print(Rank& r, int k, const std::string& line) {
    // All ranks have the same options and report a wrong one in the same words: it is printed once. A line that names a
    // rank is the view of one rank, and is always printed.
    static const std::regex names_a_rank("rank [0-9]");
    auto says_it = [&](const Rank& other) { return other.number != r.number && other.last == line; };
    const bool said = k == 1 && std::ranges::any_of(ranks_, says_it) && !std::regex_search(line, names_a_rank);
    std::FILE* to = k == 0 ? stdout : stderr;
    if (!said) std::fprintf(to, "[%d@%s] %s\n", r.number, r.host.c_str(), line.c_str());
    std::fflush(to);
    if (k == 1 && !line.empty()) r.last = line;
  }

  bool ends_job(const Rank& r) const {
    return goes_on_ ? r.ends_all() || (r.attributes_to(0) && only_rank_0_is_left()) : r.failed();
  }
  // If one rank alone does not reach rank 0, it is that rank's failure. If no rank is left that reaches rank 0, rank 0
  // has died or is stopped.
  bool only_rank_0_is_left() const {
    const auto runs = [](const Rank& r) { return r.number != 0 && r.running; };
    return (ranks_[0].running || ranks_[0].failed()) && std::ranges::none_of(ranks_, runs);
  }

  std::string running() const {  // "rank 1 on node2, rank 3 on node4"
    std::string names;
    for (const Rank& r : ranks_)
      if (r.running) names += (names.empty() ? "rank " : ", rank ") + std::to_string(r.number) + " on " + r.host;
    return names;
  }
  void kill_all(bool reports) {  // reports: names the ranks that were asked to stop and did not
    if (reports && !std::exchange(reported_kill_, true) && !running().empty())
      std::fprintf(stderr, "tandem-run: 30 s after they were asked to stop, these still run and are killed: %s\n",
                   running().c_str());
    signal_all(SIGKILL);
  }
  void signal_all(int number) {
    for (const Rank& r : ranks_)
      if (r.running || number == SIGKILL) kill(-r.pid, number);
  }

  // Reports the rank that failed first, or the failed rank that it names as the cause. Returns the exit status.
  int verdict() {
    const Rank* first = nullptr;
    for (const Rank& r : ranks_)
      if (ends_job(r) && (!first || r.ended < first->ended)) first = &r;
    if (!first) return 0;
    for (const Rank& other : ranks_)
      if (other.failed() && other.ended < first->ended + 1 && first->attributes_to(other.number) &&
          !other.attributes_to(first->number)) {
        first = &other;
        break;
      }
    if (asked) return 128 + asked;
    // After SIGKILL the last line is not about the failure: a rank cannot report it.
    const bool has_line = !first->last.empty() && first->how() != "was killed by SIGKILL";
    std::fprintf(stderr, "tandem-run: rank %d on %s failed first: it %s%s%s\n", first->number, first->host.c_str(),
                 first->how().c_str(), has_line ? ": " : "", has_line ? first->last.c_str() : "");
    return first->code();
  }

  Command c_;
  bool reported_kill_ = false;
  std::vector<Rank> ranks_;
  std::string job_;
  bool goes_on_ = false;  // the job continues without lost ranks other than 0
  bool begun_ = false;    // the rendezvous is complete, as far as this process can detect
  double drained_at_ = 0;
};

// The program of --check on every rank: ten all-reduces of 1 MiB.
void check_rank() {
  auto c = Job().communicator();
  std::vector<float> many(1 << 18, 1);
  c->barrier().wait();
  const double start = now();
  for (int i = 0; i < 10; i++) c->all_reduce(buffer(many), Combine::max).wait();
  const double each = (now() - start) / 10;
  std::printf("%s, process %d, reaches the others by %s\n", c->where(c->rank()).c_str(), int(getpid()),
              c->traffic().transport.c_str());
  std::fflush(stdout);
  c->barrier().wait();
  if (c->rank() == 0) std::printf("%s: 1 MiB all-reduced in %.2f ms\n", counted(c->size(), "rank").c_str(), each * 1e3);
}

}  // namespace

int main(int argc, char** argv) {
  int status = 0;
  const int failed = run_program(argc, argv, [&] {
    if (argc == 2 && std::string(argv[1]) == "--check-rank")
      check_rank();
    else
      status = Launch(parse(argc, argv)).run();
  });
  return failed ? failed : status;
}
