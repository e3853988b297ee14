// Survivor agreement: which ranks are still there after a failure. Every rank holds a port that refuses everybody as long as
// all is well. When the job has failed it opens it, and each rank looks for all the others, by the handshake of the
// rendezvous: also when it was rank 0 that failed, or when the network fell apart.
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

  // The ranks that found this one and were found by it, itself among them, in order; once. Ends as soon as all have been found
  // but those that are known to be lost, and after `seconds` at the latest.
  std::vector<int> answer(const std::vector<bool>& lost, double seconds = 2);

 private:
  int rank_, size_, socket_;
  std::string token_;
  std::vector<AddressRecord> records_;
};

}  // namespace tandem
