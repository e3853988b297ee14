// Messages between hosts over UCX active messages: RDMA where there is, TCP otherwise, shared memory inside a host.
// Endpoints are in UCX's PEER error mode, so that a lost peer ends every request; who was lost, the Control says by
// name.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "dist/collectives/wire.h"
#include "dist/job/control.h"
#include "dist/server/channel.h"

namespace tandem {

class Ucx {
 public:
  virtual ~Ucx() = default;
  // interface_address: of this host; UCX uses that interface (and RDMA devices), unless UCX_NET_DEVICES says otherwise.
  // What UCX may use, unless its own variables (UCX_TLS, UCX_ZCOPY_THRESH) say otherwise:
  enum class Use : std::uint8_t {
    all,
    memory,  // of one host: there is no port
    // What stands the loss of a peer. Not memory: a rank that is killed or stopped while it writes a message into
    // another rank's memory keeps that one from all further messages, of any rank. And no sends from the caller's
    // memory: UCX 1.13 over TCP ends the process by an assertion when such a send is under way to a lost peer.
    survives
  };
  static std::shared_ptr<Ucx> open(const std::string& interface_address, Use use = Use::all);
  // From now on the TCP port hears the ranks' addresses alone. Where that cannot be, stderr says why, once.
  virtual void hear_only(const std::vector<std::string>& addresses) = 0;
  virtual std::string address() const = 0;  // for the others to connect to
  // addresses: of all ranks. nonce: the job's; messages with another one are dropped.
  virtual std::shared_ptr<Wire> connect(std::vector<std::string> addresses, std::uint64_t nonce,
                                        std::shared_ptr<Control> control) = 0;
  // The twin of connect() for messages that go where their header says. One worker carries either a wire or a channel.
  // members: the ranks of the job between which it is, in the order of the addresses; empty: all.
  virtual std::unique_ptr<Channel> channel(std::vector<std::string> addresses, std::uint64_t nonce,
                                           std::shared_ptr<Control> control, std::vector<int> members = {}) = 0;
  static std::string version();
};

}  // namespace tandem
