// Restricts the peers of a port that a library has opened: the kernel drops packets from other addresses before the
// library receives them.
#pragma once
#include <string>
#include <vector>

namespace tandem {

// Descriptors of this process that listen for TCP connections.
std::vector<int> listening_sockets();

// From now on the socket accepts packets only from those IPv4 addresses ("10.0.0.3"); if the list is empty, from none.
// Returns empty on success. Otherwise nothing is changed, and it returns the reason: IPv6, too many addresses, a kernel
// without such filters.
std::string accept_only(int socket, const std::vector<std::string>& addresses);

}  // namespace tandem
