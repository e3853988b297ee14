// Rendezvous: how the ranks of a job find each other. Rank 0 listens on TCP; the others come, and each side proves to the
// other that it knows the job's token (HMAC-SHA256 over both sides' random numbers: nothing of the token crosses the network,
// and what was heard cannot be used again). The port is closed when all have come. Connections that say something else, or
// nothing, are dropped after a few seconds and keep nobody waiting.
//
// Ranks on one host need nothing: rank 0 takes a free port on the loopback interface and leaves it, with a token, in a file
// that only this user can read. Ranks on several hosts need MASTER_ADDR and TANDEM_TOKEN.
#pragma once
#include <string>
#include <vector>

#include "dist/environment.h"

namespace tandem {

// Seconds. From TANDEM_START_TIMEOUT, TANDEM_SILENCE and TANDEM_DEADLINE.
struct Deadlines {
  double start = 60;    // until all ranks have come
  double silence = 10;  // of a rank that says nothing: it is dead
  double wait = 300;    // of any wait
  static Deadlines from(const Variables& variables = process_environment());
};

class Rendezvous {
 public:
  // Waits until all ranks have come. Throws Error that says which are missing, UsageError when something must be set.
  Rendezvous(const Place& place, const Deadlines& deadlines, const Variables& variables = process_environment());
  ~Rendezvous();
  Rendezvous(const Rendezvous&) = delete;

  const Place& place() const { return place_; }
  // What every rank gives, in the order of ranks. All ranks call it; at most 16 MiB each.
  std::vector<std::string> exchange(const std::string& mine);
  // The address of this host on the way to rank 0 (at rank 0: on the way to rank 1).
  std::string interface_address() const;
  // The connections, for liveness (control.h): at rank 0 one to each rank (−1 for itself), elsewhere one to rank 0 first.
  std::vector<int> take_connections();

 private:
  void host(const std::string& token, int listener, const std::vector<std::string>& hosts);
  void join(const std::string& token, const std::string& address, int port);
  Place place_;
  Deadlines deadlines_;
  std::vector<int> connections_;
};

// "\x17\x00…": 32 random bytes; hex for people.
std::string random_bytes(std::size_t count);
std::string hex(const std::string& bytes);

// Frames on a connection: a length and so many bytes. Throw Error when the other side is gone or takes longer than `seconds`.
void send_frame(int connection, const std::string& bytes, double seconds);
std::string receive_frame(int connection, double seconds);

}  // namespace tandem
