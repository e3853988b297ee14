// Survivor agreement: determines which ranks still reach each other after a failure. Every rank has a port that refuses
// connections. After a failure the rank opens its port. Each pair of ranks connects with the handshake of the
// rendezvous; the rank with the larger number connects. This also works if rank 0 has failed or the network is split.
#pragma once
#include <string>
#include <vector>

#include "dist/job/membership.h"

namespace tandem {

class SurvivorAgreement {
 public:
  // socket: bound to the port in this rank's address record; takes ownership of it.
  SurvivorAgreement(int rank, int socket, std::string token, const Membership& members);
  ~SurvivorAgreement();
  SurvivorAgreement(const SurvivorAgreement&) = delete;

  // The ranks that are connected with this one in either direction, and itself, in order; call it once. It ends as soon
  // as all ranks that are not known to be lost were found, and after `seconds` at the latest.
  std::vector<int> answer(const std::vector<bool>& lost, double seconds = 2);

 private:
  int rank_, size_, socket_;
  std::string token_;
  std::vector<MemberSlot> members_;
};

}  // namespace tandem
