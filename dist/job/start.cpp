#include "dist/job/start.h"

#include <charconv>
#include <cstdlib>
#include <utility>

#include "core/error.h"
#include "dist/job/job.h"
#include "dist/server/asynchrony.h"
#include "dist/strategies/all_reduce.h"
#include "dist/strategies/local_sgd.h"
#include "dist/strategies/parameter_server.h"

namespace tandem {
namespace {

// Above 0 and up to 1; 0 where the text is none of that.
double share_in(const std::string& text) {
  double v = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), v);
  return error == std::errc() && end == text.data() + text.size() && v > 0 && v <= 1 ? v : 0;
}

// The parameter server's, from the environment.
ParameterServerOptions server_options(const Asynchrony& how, int ranks, const std::function<std::string(const char*)>& value) {
  const Deadlines deadlines = Deadlines::from(process_environment());
  ParameterServerOptions o{.how = how, .deadline = deadlines.wait, .patience = deadlines.patience};
  const std::string servers = value("TANDEM_SERVERS"), pipeline = value("TANDEM_PIPELINE"), wire = value("TANDEM_WIRE");
  const auto [end, error] = std::from_chars(servers.data(), servers.data() + servers.size(), o.servers);
  if (!servers.empty() && (error != std::errc() || end != servers.data() + servers.size() || o.servers < 0))
    refuse("--servers ", servers, ": expected a number of ranks from 0");
  check_servers(o.servers, ranks);
  if (!pipeline.empty() && pipeline != "0" && pipeline != "1") refuse("TANDEM_PIPELINE=", pipeline, ": choose 0 or 1");
  o.pipeline = pipeline == "1";
  if (o.pipeline && how.kind == Asynchrony::Kind::bsp)
    refuse("TANDEM_PIPELINE=1: with bsp a step is made of gradients at the weights of now. Leave it out, or choose ddc-asgd");
  if (!wire.empty() && wire != "f32" && wire != "bf16")
    refuse("TANDEM_WIRE=", wire, ": to a parameter server gradients travel as f32 or bf16");
  o.wire = wire == "bf16" ? DType::bf16 : DType::f32;
  if (const std::string snapshots = value("TANDEM_SNAPSHOTS"); !snapshots.empty()) {
    char* end = nullptr;
    o.snapshots = std::strtod(snapshots.c_str(), &end);
    if (*end || !(o.snapshots >= 0 && o.snapshots < 1e6))
      refuse("TANDEM_SNAPSHOTS=", snapshots, ": expected the seconds between two snapshots, or 0 for none");
  }
  o.tells = [](const std::string& what) { std::fprintf(stderr, "note: %s\n", what.c_str()); };
  o.pace = Pace::parse(value("TANDEM_PACE"), value("TANDEM_SLOW"), ranks);
  return o;
}

}  // namespace

bool goes_on_without_lost_ranks(const std::string& strategy) { return Asynchrony::is_one(strategy); }

std::unique_ptr<Strategy> strategy_from_environment() {
  auto value = [](const char* name) {
    const char* v = process_environment()(name);
    return std::string(v ? v : "");
  };
  const std::string strategy = value("TANDEM_STRATEGY"), wire = value("TANDEM_WIRE");
  const int ranks = place_in(process_environment()).size;
  // What is wrong is said before ranks look for each other, and to one rank alone too.
  if (Asynchrony::is_one(strategy)) {
    const auto options = server_options(Asynchrony::parse(strategy), ranks, value);
    if (ranks == 1) return std::make_unique<Strategy>();
    return parameter_server(Job({.goes_on = true}).channel(), options);
  }
  for (const auto& [name, written] : {std::pair{"TANDEM_SERVERS", "--servers "},
                                      {"TANDEM_PACE", "--pace "},
                                      {"TANDEM_SLOW", "--slow "},
                                      {"TANDEM_PIPELINE", "TANDEM_PIPELINE="}})
    if (!value(name).empty())
      refuse(written, value(name), ": is for a parameter server; choose a strategy that has one, such as --strategy ddc-asgd");
  const auto local = LocalSteps::parse(strategy);
  if (!local && !strategy.empty() && strategy != "all-reduce")
    refuse("--strategy ", strategy, ": choose all-reduce; local-sgd:STEPS, post-local-sgd:STEPS, cocod-sgd:STEPS or ",
           "easgd:STEPS; bsp, ssp:STEPS or an update rule of the parameter server: ", listed(rule_names()));
  const double top_k = wire.starts_with("topk:") ? share_in(wire.substr(5)) : 0;
  if (local && !wire.empty() && wire != "f32") refuse("TANDEM_WIRE=", wire, ": under ", strategy, " weights travel, as f32");
  if (!wire.empty() && wire != "f32" && wire != "bf16" && top_k == 0)
    refuse("TANDEM_WIRE=", wire, ": choose f32, bf16 or topk:SHARE, with a share of the gradients above 0 and up to 1");
  if (ranks == 1) return std::make_unique<Strategy>();
  const double deadline = Deadlines::from(process_environment()).wait;
  auto communicator = Job().communicator();
  if (local) return local_sgd(std::move(communicator), *local, {.deadline = deadline});
  return all_reduce(std::move(communicator),
                    {.wire = wire == "bf16" ? DType::bf16 : DType::f32, .top_k = top_k, .deadline = deadline});
}

}  // namespace tandem
