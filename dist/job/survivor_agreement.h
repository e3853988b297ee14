// Survivor agreement: determines which ranks still reach each other after a failure. Every rank has a port that refuses
// connections. After a failure the rank opens its port. Each pair of ranks connects with the handshake of the
// rendezvous; the rank with the larger number connects. This also works if rank 0 has failed or the network is split.
#pragma once
#include <string>
#include <vector>

#include "dist/job/handshake.h"
#include "dist/job/membership.h"

namespace tandem {

// The ranks that are connected with this one in either direction, and itself, in order. listener: of the port in this
// rank's address record, with the token; it is opened now. It ends as soon as all ranks that are not known to be lost
// were found, and after `seconds` at the latest.
std::vector<int> surviving_ranks(int rank, HandshakeListener& listener, const std::string& token,
                                 const std::vector<MemberSlot>& members, const std::vector<bool>& lost,
                                 double seconds = 2);

}  // namespace tandem
