#include "dist/start.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <sstream>

#include "core/error.h"
#include "dist/algorithms.h"
#include "dist/all_reduce.h"
#include "dist/hierarchy.h"
#include "dist/local_sgd.h"
#include "dist/rendezvous.h"
#include "dist/ucx.h"

namespace tandem {
namespace {

std::string host_name() {
  char name[256] = "?";
  gethostname(name, sizeof name - 1);
  return name;
}

// Processes share memory when they run on the same boot of the same machine, under the same name and in the same IPC
// namespace: the name alone is the same in many containers, and differs within a machine.
std::string host_identity() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  struct stat s {};
  if (stat("/proc/self/ns/ipc", &s) == 0) id.append(":").append(std::to_string(s.st_ino));
  return id.append(":").append(host_name());
}

// What must be the same on all ranks, a line each.
std::string agreement(const Variables& variables) {
  auto value = [&](const char* name, const char* otherwise) {
    const char* v = variables(name);
    return std::string(v && *v ? v : otherwise);
  };
  std::ostringstream text;
  text << "Tandem's messages: version 1\nUCX " << Ucx::version() << "\nTANDEM_STRATEGY "
       << value("TANDEM_STRATEGY", "all-reduce") << "\nTANDEM_WIRE " << value("TANDEM_WIRE", "f32") << "\n";
  return text.str();
}

std::string first_difference(const std::string& a, const std::string& b) {
  std::istringstream x(a), y(b);
  for (std::string p, q; std::getline(x, p) && std::getline(y, q);)
    if (p != q) return p + " and " + q;
  return "a different number of settings";
}

// Above 0 and up to 1; 0 where the text is none of that.
double share_in(const std::string& text) {
  double v = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), v);
  return error == std::errc() && end == text.data() + text.size() && v > 0 && v <= 1 ? v : 0;
}

}  // namespace

std::unique_ptr<Communicator> communicator_from_environment(const Variables& variables) {
  const Place place = place_in(variables);
  if (place.size == 1) return alone();
  const Deadlines deadlines = Deadlines::from(variables);
  Rendezvous rendezvous(place, deadlines, variables);
  const auto agreed = rendezvous.exchange(agreement(variables));
  const auto hosts = rendezvous.exchange(host_name());
  const auto identities = rendezvous.exchange(host_identity());
  const bool one_host = std::all_of(identities.begin(), identities.end(), [&](auto& i) { return i == identities[0]; });
  const std::string interface = rendezvous.interface_address();
  auto ucx = Ucx::open(interface, rendezvous.exchange(interface), one_host);
  std::vector<std::string> names;
  for (std::size_t r = 0; r < hosts.size(); r++) names.push_back("rank " + std::to_string(r) + " on " + hosts[r]);
  for (std::size_t r = 1; r < agreed.size(); r++)
    require(agreed[r] == agreed[0], names[0], " and ", names[r],
            " do not fit together: ", first_difference(agreed[0], agreed[r]));
  const auto addresses = rendezvous.exchange(ucx->address());
  const std::string nonce = rendezvous.exchange(place.rank == 0 ? random_bytes(8) : "")[0];
  std::uint64_t number = 0;
  for (unsigned char c : nonce) number = number << 8 | c;
  auto roll_call = std::make_unique<RollCall>(rendezvous);
  auto control = std::make_shared<Control>(rendezvous, names, deadlines, std::move(roll_call));
  const auto here = std::find(identities.begin(), identities.end(), identities[std::size_t(place.rank)]);
  return hierarchy(over_messages(ucx->connect(addresses, number, control), deadlines.wait, {}),
                   int(here - identities.begin()));
}

std::unique_ptr<Strategy> strategy_from_environment() {
  auto communicator = communicator_from_environment();
  if (communicator->size() == 1) return std::make_unique<Strategy>();
  auto value = [](const char* name) {
    const char* v = process_environment()(name);
    return std::string(v ? v : "");
  };
  const std::string strategy = value("TANDEM_STRATEGY"), wire = value("TANDEM_WIRE");
  if (const auto local = LocalSteps::parse(strategy)) {
    if (!wire.empty() && wire != "f32") refuse("TANDEM_WIRE=", wire, ": under ", strategy, " weights travel, as f32");
    return local_sgd(std::move(communicator), *local, {.deadline = Deadlines::from(process_environment()).wait});
  }
  if (!strategy.empty() && strategy != "all-reduce")
    refuse("TANDEM_STRATEGY=", strategy, ": choose all-reduce, local-sgd:STEPS, post-local-sgd:STEPS, cocod-sgd:STEPS or easgd:STEPS");
  const double top_k = wire.starts_with("topk:") ? share_in(wire.substr(5)) : 0;
  if (!wire.empty() && wire != "f32" && wire != "bf16" && top_k == 0)
    refuse("TANDEM_WIRE=", wire, ": choose f32, bf16 or topk:SHARE, with a share of the gradients above 0 and up to 1");
  return all_reduce(std::move(communicator), {.wire = wire == "bf16" ? DType::bf16 : DType::f32,
                                              .top_k = top_k,
                                              .deadline = Deadlines::from(process_environment()).wait});
}

}  // namespace tandem
