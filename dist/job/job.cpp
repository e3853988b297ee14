#include "dist/job/job.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <numeric>
#include <sstream>
#include <thread>
#include <utility>

#include "core/error.h"
#include "dist/collectives/hierarchy.h"
#include "dist/collectives/ucx.h"
#include "dist/job/control.h"

namespace tandem {
namespace {

// The settings that must be the same on all ranks, one per line.
std::string terms_in(const Variables& variables) {
  std::ostringstream text;
  text << "Tandem's messages: version 7\nUCX " << Ucx::version() << "\n";
  for (const auto& [name, otherwise] : {std::pair{"TANDEM_STRATEGY", "all-reduce"}, {"TANDEM_HOSTS_AS", "1"}}) {
    const std::string value = variables(name);
    text << name << " " << (value.empty() ? otherwise : value) << "\n";
  }
  return text.str();
}

std::uint64_t incarnation_in(const Variables& variables) {
  std::uint64_t restart = 0;
  if (const std::string text = variables("TANDEM_INCARNATION"); !text.empty())
    read_value("TANDEM_INCARNATION=", text, number_field("restart", restart, 0, 1e9));
  return restart;
}

// With TANDEM_HOSTS_AS=n the ranks count as those of n hosts. Returns the host of this rank.
std::string emulated_host(const Variables& variables, int rank, int size) {
  const std::string text = variables("TANDEM_HOSTS_AS");
  if (text.empty()) return "";
  int hosts = 1;
  read_value("--hosts-as ", text, number_field("hosts", hosts, 1, size));
  return "/" + std::to_string(std::int64_t(rank) * hosts / size);
}

// Survivor agreement: determines which ranks still reach each other after a failure. Every rank has a port that refuses
// connections. After a failure the rank opens its port. Each pair of ranks connects with the handshake of the
// rendezvous; the rank with the larger number connects. This also works if rank 0 has failed or the network is split.
//
// Returns the ranks that are connected with this one in either direction, and itself, in order. listener: has the port
// of this rank's address record, and the token; this call opens it. The search ends when all ranks that are not known
// to be lost were found, and after 2 seconds at the latest.
std::vector<int> surviving_ranks(int rank, HandshakeListener& listener, const std::string& token,
                                 const std::vector<MemberSlot>& members, const std::vector<bool>& lost) {
  const double until = now() + 2;
  const int size = int(members.size());
  std::vector<std::atomic<bool>> here(members.size());
  here[std::size_t(rank)] = true;
  std::atomic<bool> over{false};
  listener.open();

  // Retries until then: the other rank may notice the failure later, or may have ended.
  std::vector<std::thread> connecting;
  for (int r = 0; r < rank; r++)
    connecting.emplace_back([&, r] {
      const AddressRecord& record = members[std::size_t(r)].record;
      while (!over && now() < until) try {
          close(connect_with_token(record.address, record.port, token, rank, size, 0.5));
          here[std::size_t(r)] = true;
          return;
        } catch (const Error&) {
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
        }
    });
  auto complete = [&] {
    for (std::size_t r = 0; r < here.size(); r++)
      if (!here[r] && !lost[r]) return false;
    return true;
  };
  while (!complete() && now() < until)
    for (const HandshakeListener::Accepted& accepted : listener.wait(0.02)) {
      close(accepted.connection);
      if (accepted.ranks == size && accepted.rank >= 0 && accepted.rank < size) here[std::size_t(accepted.rank)] = true;
    }
  over = true;
  for (auto& t : connecting) t.join();

  std::vector<int> found;
  for (int r = 0; r < size; r++)
    if (here[std::size_t(r)]) found.push_back(r);
  return found;
}

}  // namespace

Job::Job(const JobOptions& options)
    : place_(place_in(options.variables)), deadlines_(Deadlines::from(options.variables)), goes_on_(options.goes_on) {
  if (size() == 1) return;
  const Variables& variables = options.variables;
  int socket = -1;  // for the survivor agreement
  const auto my_record = [&](const std::string& address, const std::vector<std::string>& all) {
    AddressRecord mine = AddressRecord::mine(address);
    mine.identity += emulated_host(variables, rank(), size());
    if (goes_on_) {
      ucx_ = std::make_shared<Ucx>(address, Ucx::Use::survives);
      ucx_->accept_only(all);
      mine.ucx = ucx_->address();
    } else {
      socket = bound_socket(place_.one_host(), 0);
      mine.port = port_of(socket);
    }
    return mine;
  };
  Rendezvous rendezvous(place_, deadlines_, variables,
                        {.goes_on = goes_on_,
                         .incarnation = goes_on_ ? incarnation_in(variables) : 0,
                         .terms = terms_in(variables),
                         .record = my_record});
  Control::Survivors survivors;
  if (!goes_on_)
    survivors = [rank = rank(), listener = std::make_shared<HandshakeListener>(socket, rendezvous.token()),
                 token = rendezvous.token(), members = rendezvous.membership().slots](const std::vector<bool>& lost) {
      return surviving_ranks(rank, *listener, token, members, lost);
    };
  control_ = std::make_shared<Control>(rendezvous, rendezvous.membership(), deadlines_, std::move(survivors));
  hosts_.clear();
  std::vector<std::string> kinds;  // in the order of their first ranks
  for (int r = 0; r < size(); r++) {
    const auto at = std::ranges::find(kinds, record(r).identity);
    hosts_.push_back(int(at - kinds.begin()));
    if (at == kinds.end()) kinds.push_back(record(r).identity);
  }
}

const AddressRecord& Job::record(int rank) const { return control_->membership().slots[std::size_t(rank)].record; }

int Job::hosts() const { return *std::ranges::max_element(hosts_) + 1; }

std::vector<int> Job::ranks_on(int host) const {
  std::vector<int> ranks;
  for (int r = 0; r < size(); r++)
    if (this->host(r) == host) ranks.push_back(r);
  return ranks;
}

int Job::local_rank() const { return int(std::count(hosts_.begin(), hosts_.begin() + rank(), host(rank()))); }

std::vector<int> Job::lane() const {
  std::vector<int> ranks;
  for (int h = 0; h < hosts(); h++) {
    const auto there = ranks_on(h);
    if (there.size() != ranks_on(0).size())
      refuse("host ", record(there[0]).host, " has ", there.size(), " ranks and host ", record(0).host, " has ",
             ranks_on(0).size(), ": start as many on every host (with --hosts-as, a number that divides the ranks)");
    ranks.push_back(there[std::size_t(local_rank())]);
  }
  return ranks;
}

std::shared_ptr<Ucx> Job::open_ucx() const {
  std::vector<std::string> all;
  for (int r = 0; r < size(); r++) all.push_back(record(r).address);
  auto ucx = std::make_shared<Ucx>(record(rank()).address, hosts() == 1 ? Ucx::Use::memory : Ucx::Use::all);
  ucx->accept_only(all);
  return ucx;
}

std::unique_ptr<Communicator> Job::messages() {
  if (size() == 1) return alone();
  auto ucx = open_ucx();
  const auto addresses = control_->gather(ucx->address());
  return over_messages(ucx->connect(addresses, control_->membership().nonce, control_), deadlines_.wait, {});
}

std::unique_ptr<Communicator> Job::communicator() { return hierarchy(messages(), host(rank())); }
std::unique_ptr<Communicator> Job::on_host() { return hierarchy(messages()->split(host(rank()), rank()), 0); }
std::unique_ptr<Communicator> Job::across_hosts() { return messages()->split(local_rank(), rank()); }

std::unique_ptr<Channel> Job::channel(std::vector<int> group) {
  if (group.empty()) {
    group.resize(std::size_t(size()));
    std::iota(group.begin(), group.end(), 0);
  }
  require(std::ranges::find(group, rank()) != group.end(), "a channel of rank ", rank(),
          " is between ranks of which it is one");
  if (size() == 1) return channel_of_one();
  require(!goes_on_ || ucx_, "a job that goes on without lost ranks has one channel for each rank");
  const auto ucx = ucx_ ? std::exchange(ucx_, nullptr) : open_ucx();
  const auto found = goes_on_ ? std::vector<std::string>() : control_->gather(ucx->address());
  std::vector<std::string> addresses;
  for (int r : group) addresses.push_back(goes_on_ ? record(r).ucx : found[std::size_t(r)]);
  return ucx->channel(std::move(addresses), control_->membership().nonce, control_, std::move(group));
}

}  // namespace tandem
