// Survivor agreement: which ranks still reach each other after a failure. Every rank has a port that refuses
// connections. When the job has failed, the rank opens it, and each rank connects to all others with the handshake of
// the rendezvous. This also works when rank 0 has failed or the network is split.
#pragma once
#include <string>
#include <vector>

#include "dist/job/membership.h"

namespace tandem {

class SurvivorAgreement {
 public:
  // socket: bound, at the port on this rank's address record; it is taken. records: of all ranks.
  SurvivorAgreement(int rank, int socket, std::string token, std::vector<AddressRecord> records);
  ~SurvivorAgreement();
  SurvivorAgreement(const SurvivorAgreement&) = delete;

  // The ranks that found this one and were found by it, itself among them, in order; once. Ends as soon as all have
  // been found but those that are known to be lost, and after `seconds` at the latest.
  std::vector<int> answer(const std::vector<bool>& lost, double seconds = 2);

 private:
  int rank_, size_, socket_;
  std::string token_;
  std::vector<AddressRecord> records_;
};

}  // namespace tandem
