// Messages between hosts over UCX active messages: RDMA where there is, TCP otherwise, shared memory inside a host. Endpoints
// are in UCX's PEER error mode, so that a lost peer ends every request; who was lost, the Control says by name.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "dist/server/channel.h"
#include "dist/job/control.h"
#include "dist/collectives/wire.h"

namespace tandem {

class Ucx {
 public:
  virtual ~Ucx() = default;
  // interface_address: of this host; UCX uses that interface (and RDMA devices), unless UCX_NET_DEVICES says otherwise.
  // transports: as in UCX_TLS, which wins where it is set; empty: all. "self,sm" on one host: there is no port. A job that goes on
  // without lost ranks takes "^sm": a rank that is killed or stopped while it writes a message into another rank's memory keeps
  // that one from all further messages, of any rank.
  static std::shared_ptr<Ucx> open(const std::string& interface_address, const std::string& transports = "");
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
