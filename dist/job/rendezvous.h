// Rendezvous: how the ranks of a job find each other. Rank 0 listens. The others connect with a handshake in which both
// sides prove that they have the job's token. The listener is closed when all ranks have joined. In a job that
// continues without lost ranks it stays open for ranks that rejoin.
//
// Ranks on one host need no settings: rank 0 listens on a local socket whose name is made of the job, and the kernel
// reports to both sides that the other is a process of the same user. Ranks on several hosts need MASTER_ADDR and
// TANDEM_TOKEN, and use TCP.
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dist/job/environment.h"
#include "dist/job/handshake.h"
#include "dist/job/membership.h"

namespace tandem {

// Seconds. From TANDEM_START_TIMEOUT, TANDEM_SILENCE, TANDEM_PATIENCE and TANDEM_DEADLINE.
struct Deadlines {
  double start = 60;     // until all ranks have joined
  double silence = 10;   // after which a rank that sends nothing counts as dead
  double patience = 30;  // without progress; then a warning names the waiting ranks
  double wait = 300;     // for any wait
  static Deadlines from(const Variables& variables = process_environment());
};

// Whether all ranks of this job have joined. Valid only for a job on a single host, without its own token, that
// continues without lost ranks, and while its rank 0 is alive.
bool has_begun(const std::string& job);

// The listener of rank 0.
struct RendezvousListener {
  RendezvousListener(int socket, const std::string& token) : listener(socket, token) { listener.open(); }
  HandshakeListener listener;
  std::optional<HandshakeListener> begun;  // has_begun() finds it; nobody is accepted there
};

// The part of one rank in the rendezvous. The defaults are for tests.
struct RendezvousOptions {
  bool goes_on = false;           // the port stays open for ranks that rejoin (take_listener())
  std::uint64_t incarnation = 0;  // above 0: this process rejoins a running job,
                                  // as this restart of its rank or a later one
  std::string terms = {};         // the settings that all ranks must share, one per line
  // Called once, when all ranks have connected. address: of this host, for the other ranks; all: of all ranks, as rank
  // 0 reaches them.
  std::function<AddressRecord(const std::string& address, const std::vector<std::string>& all)> record =
      [](const std::string& address, const std::vector<std::string>&) { return AddressRecord::mine(address); };
};

class Rendezvous {
 public:
  // Waits until all ranks have joined, or, for a rank that rejoins, until rank 0 has given up the rank's previous
  // process. Throws Error that names the missing ranks or those with other terms, UsageError if a setting is missing.
  Rendezvous(const Place& place, const Deadlines& deadlines, const Variables& variables = process_environment(),
             const RendezvousOptions& options = {});
  ~Rendezvous();
  Rendezvous(const Rendezvous&) = delete;

  const Place& place() const { return place_; }
  std::string token() const;  // a secret of the ranks
  const Membership& membership() const { return membership_; }
  // The connections, for liveness (control.h): at rank 0 one to each rank (−1 for itself), on other ranks only one, to
  // rank 0.
  std::vector<int> take_connections() { return std::exchange(connections_, {}); }
  std::unique_ptr<RendezvousListener> take_listener() { return std::move(listener_); }  // at rank 0; else null

 private:
  struct Address {  // of rank 0
    std::string text;
    int port = 0;
    bool local() const { return text.starts_with("@"); }
  };
  Address address(const Variables& variables);
  [[noreturn]] void give_up(const std::string& text);
  std::vector<std::string> accept_all(const std::vector<std::string>& hosts, double until);
  void host(const std::vector<std::string>& hosts, const RendezvousOptions& options);
  void join(const Address& address, const RendezvousOptions& options);
  Place place_;
  Deadlines deadlines_;
  std::string token_;
  std::unique_ptr<RendezvousListener> listener_;
  std::vector<int> connections_;
  Membership membership_;
};

}  // namespace tandem
