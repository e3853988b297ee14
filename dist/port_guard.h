// Who may knock at a port that a library has opened: the kernel drops what comes from other addresses before the library sees it.
#pragma once
#include <string>
#include <vector>

namespace tandem {

// Descriptors of this process that listen for TCP connections (IPv4).
std::vector<int> listening_sockets();

// From now on the socket hears those addresses alone ("10.0.0.3"). False, and nothing is changed, where
// one of them is of another kind, or the kernel has no such filters.
bool hear_only(int socket, const std::vector<std::string>& addresses);

}  // namespace tandem
