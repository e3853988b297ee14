// Who may connect to a port that a library has opened: the kernel drops what comes from other addresses before the
// library sees it.
#pragma once
#include <string>
#include <vector>

namespace tandem {

// Descriptors of this process that listen for TCP connections.
std::vector<int> listening_sockets();

// From now on the socket hears those IPv4 addresses alone ("10.0.0.3"), and nobody where there are none. Otherwise
// nothing is changed, and it says why: IPv6, too many addresses, a kernel without such filters. Empty: it is so.
std::string hear_only(int socket, const std::vector<std::string>& addresses);

}  // namespace tandem
