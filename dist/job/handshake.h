// Handshake: both sides of a TCP connection prove to each other that they have the job's token (HMAC-SHA256 over both
// sides' random numbers: the token is not sent, and recorded messages cannot be used again). Connections that send
// something else, or nothing, are closed after a few seconds and do not delay others.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "dist/job/frames.h"

namespace tandem {

// A socket on a free port (port 0) or a given one, on all addresses or only on the loopback interface. The kernel
// refuses connections until it listens. Throws Error if the port is in use.
int bound_socket(bool loopback, int port);
// A socket for the processes of this user on this host: an abstract Unix socket, which is no file and vanishes with its
// process. Its address is "@" and the name.
int local_socket(const std::string& name);
bool listens_locally(const std::string& name);
int port_of(int socket);
std::string address_of(int connection);  // "10.0.0.3": of this side
bool is_loopback(const std::string& address);

// The side that listens.
class HandshakeListener {
 public:
  HandshakeListener(int socket, std::string token) : socket_(socket), token_(std::move(token)) {}  // owns the socket
  ~HandshakeListener();
  void open();  // listens; before, the kernel refuses connections
  HandshakeListener(const HandshakeListener&) = delete;

  struct Accepted {
    int connection;   // the caller must close it
    int rank, ranks;  // as the peer states
    std::string address;
  };
  // The peers that have proven that they have the token. Waits at most `seconds`; the result is often empty.
  std::vector<Accepted> wait(double seconds);

 private:
  struct UnauthenticatedPeer {
    int connection;
    double until;
    std::string nonce, received, address;
  };
  void greet();
  int socket_;
  std::string token_;
  std::vector<UnauthenticatedPeer> unauthenticated_;
};

// The side that connects: to a listener with the same token, or at a local address of the same user. Throws Error with
// the reason if that fails.
int connect_with_token(const std::string& address, int port, const std::string& token, int rank, int ranks,
                       double seconds);

std::string random_bytes(std::size_t count);
std::string hmac(const std::string& key, const std::string& text);

}  // namespace tandem
