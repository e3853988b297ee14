#include "dist/job/rendezvous.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <thread>
#include <utility>

#include "core/error.h"
#include "core/text.h"
#include "dist/job/hosts.h"

namespace tandem {
namespace {

// The name of the local socket for the rendezvous of this user's job. Containers may share a network namespace and use
// the same numbers for processes and jobs, so the name contains the process namespace. TANDEM_JOB does not need this:
// tandem-run draws it at random, and each of its ranks may be in its own container.
std::string local_name(const std::string& job) {
  std::string name = std::to_string(geteuid()) + " " + job;
  std::error_code none;
  if (!job.starts_with("TANDEM_JOB=")) name += " " + std::filesystem::read_symlink("/proc/self/ns/pid", none).string();
  return "tandem-" + hex(hmac("name", name)).substr(0, 24);
}
std::string begun_name(const std::string& job) { return local_name(job) + "-begun"; }

bool hung_up(int connection) {
  char byte;
  const ssize_t n = recv(connection, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
}

}  // namespace

bool has_begun(const std::string& job) { return listens_locally(begun_name(job)); }

Deadlines Deadlines::from(const Variables& variables) {
  Deadlines d;
  for (const auto& [name, value] : {std::pair{"TANDEM_START_TIMEOUT", &d.start},
                                    {"TANDEM_SILENCE", &d.silence},
                                    {"TANDEM_PATIENCE", &d.patience},
                                    {"TANDEM_DEADLINE", &d.wait}}) {
    const std::string text = variables(name);
    if (text.empty()) continue;
    read_value(std::string(name) + "=", text, number_field(name, *value, above_zero, 1e6));  // seconds
  }
  return d;
}

Rendezvous::Address Rendezvous::address(const Variables& variables) {
  token_ = variables("TANDEM_TOKEN");
  if (!token_.empty() && token_.size() < 16)
    refuse("TANDEM_TOKEN is shorter than 16 characters: take `openssl rand -hex 32`");
  if (place_.one_host() && token_.empty()) return {"@" + local_name(place_.job)};
  if (token_.empty() || (place_.master.empty() && !place_.one_host()))
    refuse("ranks on several hosts (", place_.family, ", ", place_.size, " ranks", place_.local_size > 0 ? ", " : "",
           place_.local_size > 0 ? std::to_string(place_.local_size) + " here" : "", ") need ",
           place_.master.empty() ? "MASTER_ADDR, the host of rank 0, and " : "",
           "TANDEM_TOKEN, the same secret on all of them: TANDEM_TOKEN=$(openssl rand -hex 32)");
  return {place_.master.empty() ? "127.0.0.1" : place_.master, place_.port ? place_.port : 29500};
}

Rendezvous::Rendezvous(const Place& place, const Deadlines& deadlines, const Variables& variables,
                       const RendezvousOptions& options)
    : place_(place), deadlines_(deadlines), connections_(std::size_t(place.rank == 0 ? place.size : 1), -1) {
  if (place.size == 1) return;
  if (place.rank == 0 && options.incarnation)
    refuse("TANDEM_INCARNATION=", options.incarnation, ": rank 0 keeps the list, and cannot come back");
  const Address there = address(variables);
  if (place.rank != 0) {
    join(there, options);
    return;
  }
  std::vector<std::string> hosts;  // the host of each rank, if the launcher names it
  if (const std::string list = variables("TANDEM_HOSTS"); !list.empty())
    for (const Host& h : hosts_in_list(list)) hosts.insert(hosts.end(), std::size_t(h.slots), h.name);
  const int socket = there.local() ? local_socket(there.text.substr(1)) : bound_socket(false, there.port);
  listener_ = std::make_unique<RendezvousListener>(socket, token_);
  host(hosts, options);
  if (!options.goes_on)
    listener_.reset();
  else if (there.local())
    listener_->begun.emplace(local_socket(begun_name(place.job)), token_).open();
}

Rendezvous::~Rendezvous() {
  for (int fd : connections_)
    if (fd >= 0) close(fd);
}

// ---- rank 0 ---------------------------------------------------------------------------------------------------------
// The nonce of a local job is a secret, because no byte of it has left the host.
std::string Rendezvous::token() const { return token_.empty() ? hex(membership_.nonce) : token_; }

// Sends the text to all connected ranks, which fail with it too.
void Rendezvous::give_up(const std::string& text) {
  for (int fd : connections_)
    if (fd >= 0) try {
        send_frame(fd, "!" + text, 1);
      } catch (const Error&) {  // the connection is closed, which also informs it
      }
  fail(text);
}

// Waits until all ranks have connected. hosts: of all ranks, or empty. Returns their addresses; rank 0's is empty.
std::vector<std::string> Rendezvous::accept_all(const std::vector<std::string>& hosts, double until) {
  std::vector<std::string> addresses(std::size_t(place_.size));
  for (int missing = place_.size - 1; missing > 0;) {
    if (now() > until) {
      std::string absent, present;
      for (std::size_t r = 0; r < addresses.size(); r++)
        if (r > 0 && connections_[r] < 0)
          absent += (absent.empty() ? "" : ", ") + std::to_string(r) +
                    (hosts.size() == addresses.size() ? " on " + hosts[r] : "");
        else
          present += (present.empty() ? "" : ", ") + std::to_string(r) + (r ? " from " + addresses[r] : "");
      give_up("after " + digits(deadlines_.start) + " s these ranks are missing: " + absent + " (here: " + present +
              "). TANDEM_START_TIMEOUT gives them longer");
    }
    for (std::size_t r = 1; r < addresses.size(); r++)
      if (connections_[r] >= 0 && hung_up(connections_[r]))
        give_up("rank " + std::to_string(r) + ", from " + addresses[r] + ", ended before all ranks had come");
    for (const HandshakeListener::Accepted& accepted : listener_->listener.wait(0.2)) {
      const auto rank = std::size_t(accepted.rank);
      std::string refusal;
      if (accepted.ranks != place_.size)
        refusal = "rank " + std::to_string(accepted.rank) + " was started as one of " + std::to_string(accepted.ranks) +
                  " ranks, and rank 0 as one of " + std::to_string(place_.size);
      else if (accepted.rank <= 0 || accepted.rank >= place_.size || connections_[rank] >= 0)
        refusal = "rank " + std::to_string(accepted.rank) + " has come twice, from " +
                  (accepted.rank >= 0 && accepted.rank < place_.size ? addresses[rank] + " and " : "") +
                  accepted.address;
      if (!refusal.empty()) {
        connections_.push_back(accepted.connection);  // it receives the refusal too
        give_up(refusal);
      }
      connections_[rank] = accepted.connection;
      addresses[rank] = accepted.address;
      missing--;
    }
  }
  return addresses;
}

void Rendezvous::host(const std::vector<std::string>& hosts, const RendezvousOptions& options) {
  const double until = now() + deadlines_.start;
  std::vector<std::string> addresses = accept_all(hosts, until);
  // A rank on this host has connected through the loopback interface, which other hosts cannot reach.
  std::string mine = "127.0.0.1";
  for (std::size_t r = connections_.size(); r-- > 1;)
    if (const std::string a = address_of(connections_[r]); !is_loopback(a)) mine = a;
  addresses[0] = mine;
  for (std::string& a : addresses)
    if (is_loopback(a)) a = mine;
  membership_ = {.goes_on = options.goes_on, .terms = options.terms};
  const std::string nonce = random_bytes(sizeof membership_.nonce);
  std::memcpy(&membership_.nonce, nonce.data(), nonce.size());
  const auto exchange = [&](std::size_t r, const auto& body) {
    try {
      body();
    } catch (const Error&) {
      give_up("rank " + std::to_string(r) + ", from " + addresses[r] + ", ended before all ranks had come");
    }
  };
  const std::size_t size = addresses.size();
  for (std::size_t r = 1; r < size; r++) exchange(r, [&] { send_frame(connections_[r], "?" + bundle(addresses), 5); });
  membership_.slots.push_back({.record = options.record(mine, addresses)});
  for (std::size_t r = 1; r < size; r++) {
    JoinRequest request;
    exchange(r, [&] { request = JoinRequest::from(receive_frame(connections_[r], std::max(5.0, until - now()))); });
    const std::string who = "rank " + std::to_string(r) + " on " + request.record.host;
    if (request.incarnation) give_up(who + " was never in this job, which has only just begun: it cannot come back");
    if (request.terms != options.terms)
      give_up("rank 0 on " + membership_.slots[0].record.host + " and " + who +
              " do not fit together: " + first_difference(options.terms, request.terms));
    membership_.slots.push_back({.record = request.record});
  }
  for (std::size_t r = 1; r < size; r++) exchange(r, [&] { send_frame(connections_[r], "+" + membership_.text(), 5); });
}

// ---- the other ranks ------------------------------------------------------------------------------------------------
void Rendezvous::join(const Address& there, const RendezvousOptions& options) {
  const double until = now() + deadlines_.start;
  std::string why = "nothing was tried";
  for (double pause = 0.02; now() < until; pause = std::min(there.local() ? 0.1 : 1.0, pause * 1.5)) {
    std::string verdict;
    try {
      connections_[0] = connect_with_token(there.text, there.port, token_, place_.rank, place_.size, 5);
      verdict = receive_frame(connections_[0], std::max(1.0, until + 5 - now()));
    } catch (const Error& e) {
      why = std::string(e.what()) + (there.local() ? "" : " (is TANDEM_TOKEN the same on all hosts?)");
    }
    // The previous process of a rank that rejoins has not been given up yet.
    if (options.incarnation && verdict.starts_with("-")) why = std::exchange(verdict, "").substr(1);
    if (verdict.empty()) {
      if (connections_[0] >= 0) close(std::exchange(connections_[0], -1));
      std::this_thread::sleep_for(std::chrono::duration<double>(pause));
      continue;
    }
    if (!verdict.starts_with("?")) fail("rank 0 says: ", verdict.substr(1));
    const auto addresses = unbundle(verdict.substr(1));
    const std::string mine = address_of(connections_[0]);
    const JoinRequest request{options.incarnation, options.terms,
                              options.record(is_loopback(mine) ? addresses.at(0) : mine, addresses)};
    send_frame(connections_[0], request.text(), 5);
    const std::string answer = receive_frame(connections_[0], std::max(5.0, until - now()));
    if (!answer.starts_with("+")) fail("rank 0 says: ", answer.empty() ? "" : answer.substr(1));
    membership_ = Membership::from(answer.substr(1));
    return;
  }
  fail("rank ", place_.rank, " does not find rank 0: ", why);
}

}  // namespace tandem
