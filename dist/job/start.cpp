#include "dist/job/start.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <sstream>
#include <utility>

#include "core/error.h"
#include "dist/collectives/algorithms.h"
#include "dist/strategies/all_reduce.h"
#include "dist/server/asynchrony.h"
#include "dist/collectives/hierarchy.h"
#include "dist/strategies/local_sgd.h"
#include "dist/strategies/parameter_server.h"
#include "dist/job/rendezvous.h"
#include "dist/collectives/ucx.h"

namespace tandem {
namespace {

// What must be the same on all ranks, a line each.
std::string agreement(const Variables& variables) {
  auto value = [&](const char* name, const char* otherwise) {
    const char* v = variables(name);
    return std::string(v && *v ? v : otherwise);
  };
  std::ostringstream text;
  text << "Tandem's messages: version 4\nUCX " << Ucx::version() << "\n";
  for (const auto& [name, otherwise] : {std::pair{"TANDEM_STRATEGY", "all-reduce"},
                                        {"TANDEM_WIRE", "f32"},
                                        {"TANDEM_SERVERS", "0"},
                                        {"TANDEM_PIPELINE", "0"}})
    text << name << " " << value(name, otherwise) << "\n";
  return text.str();
}

// Above 0 and up to 1; 0 where the text is none of that.
double share_in(const std::string& text) {
  double v = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), v);
  return error == std::errc() && end == text.data() + text.size() && v > 0 && v <= 1 ? v : 0;
}

// A rank on the host of rank 0 may have met it by the loopback interface, where others do not find it.
void reach_from_everywhere(std::vector<Card>& cards) {
  for (Card& c : cards)
    for (const Card& other : cards)
      if (is_loopback(c.address) && other.identity == c.identity) c.address = other.address;
}

// The cards of all ranks, who are of one mind.
std::vector<Card> meet(Rendezvous& rendezvous, const Variables& variables, Card mine) {
  mine.address = rendezvous.interface_address();
  const auto agreed = rendezvous.exchange(agreement(variables));
  std::vector<Card> cards;
  for (const std::string& text : rendezvous.exchange(mine.text())) cards.push_back(Card::from(text));
  for (std::size_t r = 1; r < agreed.size(); r++)
    require(agreed[r] == agreed[0], "rank 0 on ", cards[0].host, " and rank ", r, " on ", cards[r].host,
            " do not fit together: ", first_difference(agreed[0], agreed[r]));
  reach_from_everywhere(cards);
  return cards;
}

// UCX, on the interfaces of these cards.
std::shared_ptr<Ucx> open_ucx(const std::vector<Card>& cards, int rank, bool goes_on) {
  std::vector<std::string> addresses;
  for (const Card& c : cards) addresses.push_back(c.address);
  const bool one_host =
      std::all_of(cards.begin(), cards.end(), [&](const Card& c) { return c.identity == cards[0].identity; });
  auto ucx = Ucx::open(cards[std::size_t(rank)].address, goes_on ? "^sm" : one_host ? "self,sm" : "");
  ucx->hear_only(addresses);
  return ucx;
}

// The same number on all ranks, and no other job's.
std::uint64_t draw_nonce(Rendezvous& rendezvous) {
  const auto drawn = rendezvous.exchange(rendezvous.place().rank == 0 ? random_bytes(8) : "");
  std::uint64_t number = 0;
  for (unsigned char c : drawn[0]) number = number << 8 | c;
  return number;
}

std::uint64_t incarnation_in(const Variables& variables) {
  const char* text = variables("TANDEM_INCARNATION");
  if (!text || !*text) return 0;
  std::uint64_t v = 0;
  const char* end = text + std::strlen(text);
  const auto [at, error] = std::from_chars(text, end, v);
  if (error != std::errc() || at != end)
    refuse("TANDEM_INCARNATION=", text, ": expected how manieth start of this rank it is after the first, from 1");
  return v;
}

std::unique_ptr<Channel> carry(std::shared_ptr<Control> control, std::shared_ptr<Ucx> ucx) {
  std::vector<std::string> addresses;
  for (const Seat& s : control->job().seats) addresses.push_back(Card::from(s.card).ucx);
  const std::uint64_t nonce = control->job().nonce;
  return ucx->channel(std::move(addresses), nonce, std::move(control));
}

// Into a running job.
std::unique_ptr<Channel> come_back(const Place& place, const Deadlines& deadlines, const Variables& variables,
                                   std::uint64_t incarnation) {
  Card mine = Card::mine();
  std::shared_ptr<Ucx> ucx;
  Welcome welcome;
  Rendezvous rendezvous(place, deadlines, variables,
                        {incarnation, agreement(variables),
                         [&](const std::string& address) {
                           mine.address = address;
                           ucx = Ucx::open(address, "^sm");
                           ucx->hear_only({});  // until the welcome says who the ranks are
                           mine.ucx = ucx->address();
                           return mine.text();
                         }},
                        welcome);
  auto control = std::make_shared<Control>(
      rendezvous, Control::Job{welcome.nonce, welcome.incarnation, welcome.generation, welcome.terms, welcome.seats}, deadlines);
  return carry(control, ucx);
}

}  // namespace

std::unique_ptr<Communicator> communicator_from_environment(const Variables& variables) {
  const Place place = place_in(variables);
  if (place.size == 1) return alone();
  const Deadlines deadlines = Deadlines::from(variables);
  Rendezvous rendezvous(place, deadlines, variables);
  const auto cards = meet(rendezvous, variables, Card::mine());
  auto ucx = open_ucx(cards, place.rank, false);
  std::vector<std::string> names;
  for (std::size_t r = 0; r < cards.size(); r++) names.push_back("rank " + std::to_string(r) + " on " + cards[r].host);
  const auto addresses = rendezvous.exchange(ucx->address());
  const std::uint64_t nonce = draw_nonce(rendezvous);
  auto roll_call = std::make_unique<RollCall>(rendezvous);
  auto control = std::make_shared<Control>(rendezvous, names, deadlines, std::move(roll_call));
  const auto here = std::find_if(cards.begin(), cards.end(),
                                 [&](const Card& c) { return c.identity == cards[std::size_t(place.rank)].identity; });
  return hierarchy(over_messages(ucx->connect(addresses, nonce, control), deadlines.wait, {}),
                   int(here - cards.begin()));
}

std::unique_ptr<Channel> channel_from_environment(const Variables& variables) {
  const Place place = place_in(variables);
  if (place.size == 1) return std::move(in_process_channels(1)[0]);
  const Deadlines deadlines = Deadlines::from(variables);
  const std::uint64_t incarnation = incarnation_in(variables);
  if (incarnation) return come_back(place, deadlines, variables, incarnation);
  Rendezvous rendezvous(place, deadlines, variables, true);
  auto cards = meet(rendezvous, variables, Card::mine());
  auto ucx = open_ucx(cards, place.rank, true);
  const auto addresses = rendezvous.exchange(ucx->address());
  std::vector<Seat> seats;
  for (std::size_t r = 0; r < cards.size(); r++) {
    cards[r].ucx = addresses[r];
    seats.push_back({.card = cards[r].text()});
  }
  const std::uint64_t nonce = draw_nonce(rendezvous);
  auto control =
      std::make_shared<Control>(rendezvous, Control::Job{nonce, 0, 0, agreement(variables), std::move(seats)}, deadlines);
  return carry(control, ucx);
}

namespace {

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
    return parameter_server(channel_from_environment(), options);
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
  auto communicator = communicator_from_environment();
  if (local) return local_sgd(std::move(communicator), *local, {.deadline = deadline});
  return all_reduce(std::move(communicator),
                    {.wire = wire == "bf16" ? DType::bf16 : DType::f32, .top_k = top_k, .deadline = deadline});
}

}  // namespace tandem
