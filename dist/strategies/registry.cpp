#include "dist/strategies/registry.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <vector>

#include "core/error.h"
#include "core/spec.h"
#include "dist/job/job.h"
#include "dist/server/asynchrony.h"
#include "dist/server/server_checks.h"
#include "dist/strategies/all_reduce.h"
#include "dist/strategies/daso.h"
#include "dist/strategies/hybrid.h"
#include "dist/strategies/machine_share.h"
#include "dist/strategies/parameter_server.h"
#include "dist/strategies/rounds.h"

namespace tandem {
namespace {

// The value of an environment variable; empty if it is not set.
using Setting = std::function<std::string(const char* variable)>;
using Make = StrategyMaker;

// A row of the table. A new strategy is one file in this folder, one parser here and one row below.
struct Entry {
  std::string names;                  // as listed in an error: "local-sgd:STEPS"
  std::vector<std::string> settings;  // the environment variables that it reads; those of others are refused
  // Parses the name with its arguments, and the settings, before the rendezvous. Returns a function that makes the
  // strategy, or null if the name is that of another row. Throws UsageError.
  std::function<Make(const std::string& name, const Setting& setting, int ranks)> parse;
};

double deadline() { return Deadlines::from(process_environment()).wait; }

// Prefixes of the name of a rule. machines+: a machine is one worker. hybrid+: a machine is one worker, and the last
// Linear is divided over its ranks. outer:H=100+: a push is the change of the weights by a worker's own steps.
constexpr std::string_view machines = "machines+", hybrids = "hybrid", rounds_of = "outer";
std::size_t length_before_rule(const std::string& name) {
  if (name.starts_with(machines)) return machines.size();
  const std::size_t plus = name.find('+');
  return (name.starts_with(rounds_of) || name.starts_with(hybrids)) && plus != name.npos ? plus + 1 : 0;
}
std::string rule_in(const std::string& name) { return name.substr(length_before_rule(name)); }
bool of_machines(const std::string& name) { return name.starts_with(machines) || name.starts_with(hybrids); }

// ---- one parser for each row ----------------------------------------------------------------------------------------
AllReduceOptions all_reduce_options(const Setting& setting) {
  AllReduceOptions o{.deadline = deadline()};
  const std::string wire = setting("TANDEM_WIRE");
  const std::string kind = spec_name(wire);
  if (kind == "topk") {
    read_spec(wire, {bare(number_field("share", o.top_k, above_zero, 1))});
  } else if (kind == "powersgd") {
    read_spec(wire, {bare(number_field("rank", o.power_sgd, 1, 1e9))});
  } else if (wire == "bf16") {
    o.wire = DType::bf16;
  }
  if (o.top_k == 0 && o.power_sgd == 0 && !wire.empty() && wire != "f32" && wire != "bf16")
    refuse("TANDEM_WIRE=", wire,
           ": choose f32, bf16, topk:SHARE, with a share of the gradients above 0 and up to 1, or powersgd:RANK, ",
           "with a rank from 1");
  return o;
}

Make parse_all_reduce(const std::string& name, const Setting& setting, int) {
  if (!name.empty() && name != "all-reduce") return {};
  return [o = all_reduce_options(setting)] { return all_reduce(Job().communicator(), o); };
}

Make parse_rounds(const std::string& name, const Setting& setting, int) {
  if (name.starts_with(rounds_of) && name.find('+') != name.npos) return {};  // parse_server()
  const auto how = RoundSteps::parse(name);
  if (!how) return {};
  if (const std::string wire = setting("TANDEM_WIRE"); !wire.empty() && wire != "f32")
    refuse("TANDEM_WIRE=", wire, ": under ", name, " weights travel, as f32");
  return [how] { return rounds(Job().communicator(), *how, {.deadline = deadline()}); };
}

DasoRanks daso_ranks(Job& job) {
  job.lane();  // refuses hosts with different numbers of ranks
  DasoRanks ranks{
      .everybody = job.communicator(), .gradients = job.on_host(), .host = job.on_host(), .across = job.across_hosts()};
  return ranks;
}

Make parse_daso(const std::string& name, const Setting&, int) {
  const auto how = DasoOptions::parse(name);
  if (!how) return {};
  return [how] {
    Job job;
    return daso(daso_ranks(job), *how, {.deadline = deadline()});
  };
}

// The last Linear is divided over the ranks of each host. Another strategy trains the other layers: all-reduce if none
// is named, DASO, or an update rule of the parameter server (parse_server()).
Make parse_hybrid(const std::string& name, const Setting& setting, int) {
  if (!name.starts_with(hybrids) || Asynchrony::is_one(rule_in(name))) return {};
  const std::size_t plus = std::min(name.find('+'), name.size());
  const auto how = SlicedClassifier::parse(name.substr(0, plus));
  const std::string rest = name.substr(std::min(plus + 1, name.size()));
  const auto between = DasoOptions::parse(rest);
  if (const std::string wire = setting("TANDEM_WIRE"); between && !wire.empty())
    refuse("TANDEM_WIRE=", wire,
           ": DASO's option bf16 says what its exchanges between hosts are made in: leave it out");
  if (plus < name.size() && rest != "all-reduce" && !between)
    refuse("--strategy ", name, ": the hybrid cannot be joined with '", rest,
           "': choose hybrid+all-reduce, hybrid+daso, or hybrid+ before an "
           "update rule of the parameter server, as in hybrid+ddc-asgd");
  return [how, between, o = all_reduce_options(setting)]() mutable -> std::unique_ptr<Strategy> {
    Job job;
    job.lane();  // refuses hosts with different numbers of ranks
    o.classifier = std::make_shared<SlicedClassifier>(job.on_host(), how);
    if (between) return daso(daso_ranks(job), *between, {.deadline = o.deadline, .classifier = o.classifier});
    return all_reduce(job.communicator(), o);
  };
}

// Rounds that arrive late have other defaults: more rounds with less momentum. A rule that adds the full pushes of
// `pushes` workers uses a share of each (both our choice).
std::optional<RoundSteps> round_in(const std::string& name, int pushes) {
  if (!name.starts_with(rounds_of)) return {};
  RoundSteps defaults{.kind = RoundSteps::Kind::outer, .every = {.steps = 20}, .momentum = 0.3};
  if (pushes > 1) defaults.learning_rate = 1.0 / pushes;
  auto how = RoundSteps::parse(name.substr(0, length_before_rule(name) - 1), defaults);
  if (how && (how->stream > 1 || how->overlap != 0 || how->every.alpha > 0))
    refuse(name,
           ": without waiting for others a round has H=STEPS, momentum and lr alone, and a worker that is slower makes "
           "fewer steps");
  return how;
}

Make parse_server(const std::string& full_name, const Setting& setting, int ranks) {
  const std::string name = rule_in(full_name);
  if (!Asynchrony::is_one(name)) return {};
  const Deadlines deadlines = Deadlines::from(process_environment());
  ParameterServerOptions o{.how = Asynchrony::parse(name), .deadline = deadlines.wait, .patience = deadlines.patience};
  const std::string servers = setting("TANDEM_SERVERS"), wire = setting("TANDEM_WIRE"),
                    snapshots = setting("TANDEM_SNAPSHOTS");
  if (!servers.empty()) o.servers = parsed<int>(servers).value_or(-1);
  if (o.servers < 0) refuse("--servers ", servers, ": expected a number of ranks from 0");
  check_servers(o.servers, ranks);
  if (ranks > 1) o.how.check_workers(name, ranks - o.servers);
  if (!wire.empty() && wire != "f32" && wire != "bf16")
    refuse("TANDEM_WIRE=", wire, ": to a parameter server gradients travel as f32 or bf16");
  o.wire = wire == "bf16" ? DType::bf16 : DType::f32;
  if (!snapshots.empty()) o.snapshots = parsed<double>(snapshots).value_or(-1);
  if (!(o.snapshots >= 0 && o.snapshots < 1e6))
    refuse("TANDEM_SNAPSHOTS=", snapshots, ": expected the seconds between two snapshots, or 0 for none");
  o.tells = [](const std::string& what) { std::fprintf(stderr, "note: %s\n", what.c_str()); };
  o.stragglers = StragglerEmulation::parse(setting("TANDEM_PACE"), setting("TANDEM_SLOW"), ranks);
  const bool quorum = o.how.kind == Asynchrony::Kind::quorum;
  o.round = round_in(full_name, quorum || o.how.rule == "delayed-nesterov" ? 1 : ranks - o.servers);
  if (o.round && quorum && name.find('+') == name.npos) o.how.rule = "delayed-nesterov";
  // A step of a quorum already uses the mean of its rounds.
  if (o.round && o.how.rule == "delayed-nesterov")
    o.how.rule += ":every=" + std::to_string(quorum ? 1 : ranks - o.servers);
  if (o.round && o.how.kind != Asynchrony::Kind::asp && !quorum)
    refuse(full_name, ": rounds of a worker's own steps go with an update rule alone, or with quorum:WORKERS, as in ",
           rounds_of, ":H=100+delayed-nesterov");
  if (o.round && make_rule(o.how.rule)->clip() > 0)
    refuse(full_name,
           ": what a round pushes is no gradient: leave clip out, or clip the gradients of its steps by --clip");
  if (!of_machines(full_name)) return [o] { return parameter_server(Job({.goes_on = true}).channel(), o); };
  if (!o.how.takes_each() && o.how.kind != Asynchrony::Kind::bsp)
    refuse(full_name,
           ": each rank of a machine would choose the pushes of a step by itself: choose an update rule alone, or bsp");
  if (!setting("TANDEM_INCARNATION").empty())
    refuse("--restart: under ", full_name,
           " a machine leaves as a whole, and its ranks cannot come back one at a time: leave it out");
  std::optional<double> sliced;
  if (full_name.starts_with(hybrids)) sliced = SlicedClassifier::parse(full_name.substr(0, full_name.find('+')));
  return [o, sliced]() mutable {
    Job job({.goes_on = true});
    if (sliced) o.classifier = std::make_shared<SlicedClassifier>(job.on_host(), *sliced);
    auto machine = std::make_unique<MachineShare>(job.on_host(), job.ranks_on(job.host(job.rank())), job.size());
    return parameter_server_of_machines(std::move(machine), job.channel(job.lane()), o);
  };
}

// ---- the table ------------------------------------------------------------------------------------------------------
std::vector<Entry> entries() {
  return {
      {"all-reduce", {"TANDEM_WIRE"}, parse_all_reduce},
      {"hybrid or hybrid:sample=SHARE, alone or before +all-reduce, +daso or +RULE", {"TANDEM_WIRE"}, parse_hybrid},
      {"local-sgd:STEPS, post-local-sgd:STEPS, cocod-sgd:STEPS, easgd:STEPS, or "
       "outer:H=STEPS,momentum=NUMBER,lr=NUMBER,stream=FRAGMENTS,overlap=STEPS",
       {"TANDEM_WIRE"},
       parse_rounds},
      {Asynchrony::forms() + ", or one of these behind machines+ or outer:H=STEPS+",
       {"TANDEM_WIRE", "TANDEM_SERVERS", "TANDEM_SNAPSHOTS"},
       parse_server},
      {"daso, daso:faithful or daso:B=4,W=1,warm-up=4,cool-down=4", {}, parse_daso},
  };
}

// Settings that only some strategies read, in the form that the user writes.
constexpr struct {
  const char *variable, *written, *what;
} particular[] = {{"TANDEM_SERVERS", "--servers ", "is for a parameter server"},
                  {"TANDEM_SNAPSHOTS", "TANDEM_SNAPSHOTS=", "is for a parameter server"},
                  {"TANDEM_WIRE", "TANDEM_WIRE=", "this strategy does not read it"}};

}  // namespace

// Emulates ranks with longer steps. The workers of a parameter server do this themselves, since they also wait for
// their next batch.
static void emulate(Strategy& strategy, const StragglerEmulation& stragglers) {
  if (stragglers.mean <= 0) return;
  strategy.emulation = [stragglers, &strategy, step = std::uint32_t(0), began = Clock::now()](bool computed) mutable {
    if (computed)
      stragglers.keep(strategy.rank(), step++, began, [] { return false; });
    else
      began = Clock::now();
  };
}

bool goes_on_without_lost_ranks(const std::string& name) { return Asynchrony::is_one(rule_in(name)); }
bool ranks_return(const std::string& name) { return Asynchrony::is_one(rule_in(name)) && !of_machines(name); }

std::unique_ptr<Strategy> strategy_from_environment(const std::vector<NamedStrategy>& own) {
  const Setting setting = [](const char* name) {
    const char* v = process_environment()(name);
    return std::string(v ? v : "");
  };
  const int ranks = place_in(process_environment()).size;
  const std::string name = setting("TANDEM_STRATEGY");
  std::vector<Entry> all = entries();
  for (const NamedStrategy& s : own)
    all.push_back({s.form, {}, [parse = s.parse](const std::string& n, const Setting&, int) { return parse(n); }});
  std::string names;
  for (const Entry& e : all) {
    // Errors are reported before the rendezvous, also with one rank
    const Make make = e.parse(name, setting, ranks);
    names += (names.empty() ? "" : "; ") + e.names;
    if (!make) continue;
    for (const auto& [variable, written, what] : particular)
      if (!setting(variable).empty() && std::find(e.settings.begin(), e.settings.end(), variable) == e.settings.end())
        refuse(written, setting(variable), ": ", what, "; choose a strategy that has it, such as --strategy ddc-asgd");
    const auto stragglers = StragglerEmulation::parse(setting("TANDEM_PACE"), setting("TANDEM_SLOW"), ranks);
    if (ranks == 1 && !name.empty() && name != "all-reduce")
      std::fprintf(stderr, "note: --strategy %s is without effect: one process trains alone\n", name.c_str());
    std::unique_ptr<Strategy> strategy = ranks == 1 ? std::make_unique<Strategy>() : make();
    if (!Asynchrony::is_one(rule_in(name))) emulate(*strategy, stragglers);
    return strategy;
  }
  refuse("--strategy ", name, ": choose ", names);
}

}  // namespace tandem
