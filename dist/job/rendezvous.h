// Rendezvous: how the ranks of a job find each other. Rank 0 listens on TCP. The others connect with a handshake in
// which both sides prove that they know the job's token. The port is closed when all ranks have joined. In a job that
// continues without lost ranks it stays open for ranks that rejoin.
//
// Ranks on one host need no settings: rank 0 takes a free port on the loopback interface and writes the port and a
// token to a file that only this user can read. Ranks on several hosts need MASTER_ADDR and TANDEM_TOKEN.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/files/files.h"
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

// Removes the file of a rank 0 that was killed before all ranks had joined.
void forget_rendezvous(const std::string& job, const Variables& variables = process_environment());

// Whether all ranks of this job have joined. Valid only for a job on a single host, without its own token, that
// continues without lost ranks, and while its rank 0 is alive.
bool has_begun(const std::string& job, const Variables& variables = process_environment());

// The listener of rank 0, and the file with its address.
struct RendezvousListener {
  std::unique_ptr<HandshakeListener> listener;
  std::string file;  // empty: none
  FileLock lock;     // for the file
  ~RendezvousListener();
};

class Rendezvous {
 public:
  // Waits until all ranks have joined. Throws Error that names the missing ranks, UsageError if a setting is missing.
  // stays_open: the port stays open for ranks that rejoin (take_listener()).
  Rendezvous(const Place& place, const Deadlines& deadlines, const Variables& variables = process_environment(),
             bool stays_open = false);
  // For a rank that rejoins a running job. Waits until rank 0 has given up the rank's previous process. record: called
  // when the route to rank 0 is known, with this host's address as seen by the other ranks.
  struct Return {
    std::uint64_t incarnation;  // the minimum; the membership has the actual value
    std::string terms;          // the settings that this rank expects
    std::function<std::string(const std::string& address)> record;
  };
  Rendezvous(const Place& place, const Deadlines& deadlines, const Variables& variables, const Return& back,
             Membership& membership);
  ~Rendezvous();
  Rendezvous(const Rendezvous&) = delete;

  const Place& place() const { return place_; }
  // The address of this host on the route to rank 0 (at rank 0: to the first rank that joins from another host, or to
  // rank 1).
  std::string interface_address() const;
  const std::string& token() const { return token_; }
  // The connections, for liveness (control.h): at rank 0 one to each rank (−1 for itself), on other ranks only one, to
  // rank 0.
  std::vector<int> take_connections();
  std::unique_ptr<RendezvousListener> take_listener();  // at rank 0; else null

 private:
  // The location of rank 0: a file, or an address and port.
  struct Way {
    std::string file, address;
    int port = 0;
  };
  Way way(const Variables& variables);
  void host(const std::vector<std::string>& hosts);
  template <class Verdict>
  void join(const Way& way, const Verdict& verdict);
  Place place_;
  std::unique_ptr<RendezvousListener> listener_;
  Deadlines deadlines_;
  std::string token_;
  std::vector<int> connections_;
};

}  // namespace tandem
