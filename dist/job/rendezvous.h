// Rendezvous: how the ranks of a job find each other. Rank 0 listens on TCP; the others come, by a handshake in which
// both sides prove that they know the job's token. The port is closed when all have come; in a job that goes on without
// lost ranks it stays open, for those that come back.
//
// Ranks on one host need no settings: rank 0 takes a free port on the loopback interface and writes it, with a token,
// to a file that only this user can read. Ranks on several hosts need MASTER_ADDR and TANDEM_TOKEN.
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
  double start = 60;     // until all ranks have come
  double silence = 10;   // of a rank that says nothing: it is dead
  double patience = 30;  // without progress; then a warning says who waits for whom
  double wait = 300;     // of any wait
  static Deadlines from(const Variables& variables = process_environment());
};

// Removes the file of a rank 0 that was killed before all ranks had come.
void forget_rendezvous(const std::string& job, const Variables& variables = process_environment());

// Whether all ranks of this job have come. Only of one on a single host, without a token of its own, that goes on
// without lost ranks, and as long as its rank 0 lives.
bool has_begun(const std::string& job, const Variables& variables = process_environment());

// The listener of rank 0, and the file with its address.
struct RendezvousListener {
  std::unique_ptr<HandshakeListener> listener;
  std::string file;  // empty: none
  FileLock lock;     // of the file
  ~RendezvousListener();
};

class Rendezvous {
 public:
  // Waits until all ranks have come. Throws Error that says which are missing, UsageError when something must be set.
  // stays_open: the port, for ranks that come back (take_listener()).
  Rendezvous(const Place& place, const Deadlines& deadlines, const Variables& variables = process_environment(),
             bool stays_open = false);
  // Of a rank that comes back into a running job. Waits until rank 0 has given up the one before. record: called when
  // the way to rank 0 is known, with the address by which the others reach this host.
  struct Return {
    std::uint64_t incarnation;  // at least; the membership says which it is
    std::string terms;          // what this rank takes for agreed
    std::function<std::string(const std::string& address)> record;
  };
  Rendezvous(const Place& place, const Deadlines& deadlines, const Variables& variables, const Return& back,
             Membership& membership);
  ~Rendezvous();
  Rendezvous(const Rendezvous&) = delete;

  const Place& place() const { return place_; }
  // The address of this host on the way to rank 0 (at rank 0: to the first rank that comes from another host, or to
  // rank 1).
  std::string interface_address() const;
  const std::string& token() const { return token_; }
  // The connections, for liveness (control.h): at rank 0 one to each rank (−1 for itself), elsewhere one to rank 0
  // first.
  std::vector<int> take_connections();
  std::unique_ptr<RendezvousListener> take_listener();  // at rank 0; else null

 private:
  // Where rank 0 is: by a file, or at a port.
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
