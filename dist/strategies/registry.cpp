#include "dist/strategies/registry.h"

#include <cstdio>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/files/files.h"
#include "core/spec.h"
#include "dist/job/job.h"
#include "dist/server/asynchrony.h"
#include "dist/server/rules.h"
#include "dist/strategies/all_reduce.h"
#include "dist/strategies/daso.h"
#include "dist/strategies/federated.h"
#include "dist/strategies/hybrid.h"
#include "dist/strategies/local_steps.h"
#include "dist/strategies/machine_share.h"
#include "dist/strategies/parameter_server.h"

namespace tandem {
namespace {

using Make = StrategyMaker;

// A strategy by its text: its own spec, what contains it, and the settings of its options.
struct Asked {
  std::string text;    // as the user wrote it
  Spec spec;           // "daso:B=8"; of a parameter server "ssp:3+ddc-asgd"
  std::string around;  // the name of what contains it: hybrid, machines or outer; empty: nothing
  std::string outer;   // that with its options: "outer:H=100"
  std::string wire, servers, snapshots, pace, slow;  // empty: not given
  int ranks = 1;

  Asked(const std::string& t, int n) : text(t), spec(Spec::parse(t.empty() ? "all-reduce" : t)), ranks(n) {
    for (const auto& [key, value] :
         {std::pair{"wire", &wire}, {"servers", &servers}, {"snapshots", &snapshots}, {"pace", &pace}, {"slow", &slow}})
      *value = spec.take(key);
    if (spec.name != "hybrid" && !(spec.inner && (spec.name == "machines" || spec.name == "outer"))) return;
    const auto inner = spec.inner ? spec.inner : std::make_shared<Spec>(Spec{.name = "all-reduce"});
    spec.inner = nullptr;
    around = spec.name;
    outer = spec.text();
    if (around == "hybrid") for_option("--strategy", [&] { SlicedClassifier::parse(outer); });
    if (around == "machines") for_option("--strategy", [&] { read_spec(outer, {}); });
    spec = Spec(*inner);
  }
  bool served() const { return Asynchrony::is_one(spec.name); }
  // All ranks of a machine are one worker of the parameter server.
  bool of_machines() const { return around == "machines" || around == "hybrid"; }
};

double deadline() { return Deadlines::from(process_environment()).wait; }

std::shared_ptr<SlicedClassifier> classifier(Job& job, const Asked& a) {
  job.lane();  // refuses hosts with different numbers of ranks
  return a.around.empty() ? nullptr
                          : std::make_shared<SlicedClassifier>(job.on_host(), SlicedClassifier::parse(a.outer));
}

// ---- one function for each row --------------------------------------------------------------------------------------
Make make_all_reduce(const Asked& a) {
  const auto taken = [](const std::string&) { return false; };  // Asked has taken a value
  read_spec(a.spec.text(), {{"wire", "f32, bf16, topk:SHARE or powersgd:RANK", taken}});
  AllReduceOptions o{.deadline = deadline()};
  const std::string kind = spec_name(a.wire);
  if (a.wire == "bf16") o.wire = DType::bf16;
  if (kind == "topk") read_spec(a.wire, {bare(number_field("share", o.top_k, above_zero, 1))});
  if (kind == "powersgd") read_spec(a.wire, {bare(number_field("rank", o.power_sgd, 1, 1e9))});
  if (o.top_k == 0 && o.power_sgd == 0 && !a.wire.empty() && a.wire != "f32" && a.wire != "bf16")
    refuse("wire=", a.wire, ": choose f32, bf16, topk:SHARE, with a share of the gradients above 0 and up to 1, ",
           "or powersgd:RANK, with a rank from 1");
  return [a, o]() mutable {
    Job job;
    if (!a.around.empty()) o.classifier = classifier(job, a);
    return all_reduce(job.communicator(), o);
  };
}

template <class How>
Make make_rounds(const Asked& a) {
  const How how = *How::parse(a.spec.text());
  if (!a.wire.empty() && a.wire != "f32") refuse("wire=", a.wire, ": under ", a.text, " weights travel, as f32");
  return [how] { return rounds({.everybody = Job().communicator()}, how, {.deadline = deadline()}); };
}

Make make_daso(const Asked& a) {
  const auto how = DasoOptions::parse(a.spec.text());
  if (!a.wire.empty())
    refuse("wire=", a.wire, ": DASO's option bf16 says what its exchanges between hosts are made in: leave it out");
  return [a, how] {
    Job job;
    const auto sliced = classifier(job, a);
    return rounds({.everybody = job.communicator(),
                   .gradients = job.on_host(),
                   .host = job.on_host(),
                   .across = job.across_hosts()},
                  *how, {.deadline = deadline(), .classifier = sliced});
  };
}

// Rounds that arrive late have other defaults: more rounds with less momentum. A rule that adds the full pushes of
// `pushes` workers uses a share of each (both our choice).
RoundSteps late_rounds(const std::string& text, int pushes) {
  RoundSteps defaults{.kind = "outer", .every = {.steps = 20}, .momentum = 0.3};
  if (pushes > 1) defaults.learning_rate = 1.0 / pushes;
  const RoundSteps how = *RoundSteps::parse(text, defaults);
  if (how.stream > 1 || how.overlap != 0 || how.every.alpha > 0)
    refuse(text, ": without waiting for others a round has H=STEPS, momentum and lr alone, ",
           "and a worker that is slower makes fewer steps");
  return how;
}

Make make_server(const Asked& a) {
  const Deadlines deadlines = Deadlines::from(process_environment());
  const std::string name = a.spec.text();
  ParameterServerOptions o{{.how = Asynchrony::parse(name)}};
  o.deadline = deadlines.wait;
  o.patience = deadlines.patience;
  if (!a.servers.empty()) read_value("--servers ", a.servers, number_field("servers", o.servers, 0, 1e6));
  check_servers(o.servers, a.ranks);
  const int workers = a.ranks - o.servers;
  if (a.ranks > 1) o.how.check_workers(name, workers);
  if (!a.wire.empty() && a.wire != "f32" && a.wire != "bf16")
    refuse("wire=", a.wire, ": to a parameter server gradients travel as f32 or bf16");
  o.wire = a.wire == "bf16" ? DType::bf16 : DType::f32;
  if (!a.snapshots.empty()) read_value("snapshots=", a.snapshots, number_field("snapshots", o.snapshots, 0, 1e6));
  o.notify = [](const std::string& what) { std::fprintf(stderr, "note: %s\n", what.c_str()); };
  if (a.around == "outer") {
    const bool quorum = o.how.kind == Asynchrony::Kind::quorum;
    if (!quorum && o.how.kind != Asynchrony::Kind::asp)
      refuse(a.text, ": rounds of a worker's own steps go with an update rule alone, or with quorum:WORKERS, ",
             "as in outer:H=100+delayed-nesterov");
    if (make_rule(o.how.rule)->clip() > 0)
      refuse(a.text, ": a round pushes no gradient: leave clip out, or clip the gradients of its steps by --clip");
    // A step of a quorum already uses the mean of its rounds.
    const bool nesterov = o.how.rule == "delayed-nesterov" || (quorum && !a.spec.inner);
    if (nesterov) o.how.rule = Spec{"delayed-nesterov", {"every=" + std::to_string(quorum ? 1 : workers)}}.text();
    o.round = late_rounds(a.outer, quorum || nesterov ? 1 : workers);
  }
  if (!a.of_machines()) return [o] { return parameter_server(Job({.goes_on = true}).channel(), o); };
  if (!o.how.takes_each() && o.how.kind != Asynchrony::Kind::bsp)
    refuse(a.text,
           ": each rank of a machine would choose the pushes of a step by itself: choose an update rule alone, or bsp");
  if (!process_environment()("TANDEM_INCARNATION").empty())
    refuse("--restart: under ", a.text,
           " a machine leaves as a whole, and its ranks cannot come back one at a time: leave it out");
  return [o, a]() mutable {
    Job job({.goes_on = true});
    if (a.around == "hybrid") o.classifier = classifier(job, a);
    auto machine = std::make_unique<MachineShare>(job.on_host(), job.ranks_on(job.host(job.rank())), job.size());
    return parameter_server(job.channel(job.lane()), o, std::move(machine));
  };
}

// ---- the table ------------------------------------------------------------------------------------------------------
struct Entry {
  std::string name, options;  // options: by described() in core/spec.h
  std::string inside;         // what may contain it
  // Checks all options before the rendezvous; throws UsageError. Returns a function that makes the strategy.
  std::function<Make(const Asked&)> make;
};

std::vector<Entry> entries() {
  const auto described_of = [](auto options) { return described(options.fields()); };
  double sample = 1;
  std::vector<Entry> all{
      {"all-reduce", "`wire`: f32, bf16, topk:SHARE or powersgd:RANK (f32)", "hybrid", make_all_reduce},
      {"hybrid", described(SlicedClassifier::fields(sample)), "", {}},
      {"daso", described_of(DasoOptions()), "hybrid", make_daso}};
  for (const std::string& name : RoundSteps::names())
    all.push_back({name, described_of(*RoundSteps::parse(name)), "", make_rounds<RoundSteps>});
  for (const std::string& name : Asynchrony::names())
    all.push_back({name, Asynchrony::options(name), "hybrid machines outer", make_server});
  for (const std::string& name : Federated::names())
    all.push_back({name, described_of(*Federated::parse(name)), "", make_rounds<Federated>});
  return all;
}

}  // namespace

void emulate(Strategy& strategy, const StragglerEmulation& stragglers) {
  if (stragglers.mean <= 0) return;
  strategy.emulation = [stragglers, &strategy, step = std::uint32_t(0), began = Clock::now()](bool computed) mutable {
    if (computed) stragglers.keep(strategy.rank(), step++, began);
    began = Clock::now();
  };
}

bool goes_on_without_lost_ranks(const std::string& text) { return Asked(text, 1).served(); }
bool ranks_return(const std::string& text) {
  const Asked a(text, 1);
  return a.served() && !a.of_machines();
}
std::string with_option(const std::string& strategy, const std::string& key, const std::string& values) {
  Spec spec = Spec::parse(strategy.empty() ? "all-reduce" : strategy);
  for (const std::string& value : parts_of(values, ',')) spec.options.push_back(key + "=" + value);
  return spec.text();
}

std::string strategy_table() {
  std::string text = "| strategy | options, with their defaults |\n|---|---|\n";
  for (const Entry& r : entries()) text += "| `" + r.name + "` | " + r.options + " |\n";
  for (const auto& [name, options] : {std::pair{"hybrid+…", "before all-reduce, daso, an update rule, ssp or bsp"},
                                      {"machines+…", "before an update rule, ssp or bsp"},
                                      {"outer:H=STEPS,…+…",
                                       "before an update rule or quorum: `momentum` (0.3), `lr` (1/workers; before "
                                       "delayed-nesterov or quorum 0.7), `H` (20)"},
                                      {"of the parameter server", "`servers`, `snapshots` and `wire` (f32 or bf16)"},
                                      {"all", "`pace` and `slow`, as the options of tandem-run"}})
    text += std::string("| ") + name + " | " + options + " |\n";
  return text;
}

std::unique_ptr<Strategy> strategy_from_environment(const std::vector<NamedStrategy>& own) {
  const int ranks = place_in(process_environment()).size;
  const Asked a(process_environment()("TANDEM_STRATEGY"), ranks);
  Entry row;
  for (const Entry& r : entries())
    if (r.name == a.spec.name) row = r;
  for (const NamedStrategy& s : own)
    if (!row.make && s.parse(a.spec.name)) row.make = [s](const Asked& asked) { return s.parse(asked.spec.text()); };
  if (!row.make)
    refuse("--strategy ", a.text, ": choose ", joined(entries(), ", ", &Entry::name), ", ",
           joined(own, "", [](const NamedStrategy& s) { return s.form + ", "; }),
           "or one that contains another (tandem-run --strategies lists all with their options)");
  if (!a.around.empty() && row.inside.find(a.around) == std::string::npos)
    refuse("--strategy ", a.text, ": the ", a.around, " cannot be joined with '", a.spec.text(), "'",
           a.around == "hybrid" ? ": choose hybrid+all-reduce, hybrid+daso, or hybrid+ before an update rule of the "
                                  "parameter server, as in hybrid+ddc-asgd"
                                : ": it goes before an update rule of the parameter server");
  for (const auto& [key, value] : {std::pair{"--servers ", &a.servers}, {"snapshots=", &a.snapshots}})
    if (!value->empty() && !a.served())
      refuse(key, *value, ": is for a parameter server; choose a strategy that has it, such as --strategy ddc-asgd");
  // Errors are reported before the rendezvous, also with one rank
  const Make make = for_option("--strategy", [&] { return row.make(a); });
  const auto stragglers = StragglerEmulation::parse(a.pace, a.slow, ranks);
  if (ranks == 1 && a.text != "" && a.text != "all-reduce")
    std::fprintf(stderr, "note: --strategy %s is without effect: one process trains alone\n", a.text.c_str());
  std::unique_ptr<Strategy> strategy = ranks == 1 ? std::make_unique<Strategy>() : make();
  emulate(*strategy, stragglers);
  return strategy;
}

}  // namespace tandem
